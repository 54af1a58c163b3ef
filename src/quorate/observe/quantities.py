"""Numbers as a person reads them. Plain ASCII: they also go into files and narrow terminals."""


def count(value: float) -> str:
    """A whole number with separators, such as 12,345; small rates keep a decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure(value: object) -> str:
    """A loss or metric, to four digits; in files, None stands for what JSON has no number for."""
    if value is None:
        return "not finite"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:#.4g}"


def size(count_of_bytes: float) -> str:
    """Bytes in the largest fitting unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count_of_bytes < 1000:
            return f"{count_of_bytes:.3g} {unit}"
        count_of_bytes /= 1000
    return f"{count_of_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """A time span as 42 s, 3:07 or 2:03:07; short ones with decimals."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"
