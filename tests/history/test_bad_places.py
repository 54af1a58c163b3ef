"""In which files bad samples lie: a range may reach over several, and over one without records."""

import json
from pathlib import Path

from quorate.history.streaming import bad_places
from quorate.shards.indexing import build_index


def test_a_range_is_cut_where_files_end(tmp_path: Path) -> None:
    for name, records in (("a", 4), ("b", 3), ("c", 5)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps({'id': each})}\n" for each in range(records)))
    index = build_index(str(tmp_path))
    assert [place.in_words for place in bad_places(index, ((1, 1), (3, 8), (11, 40)))] == [
        "sample 1: record 1 of a.jsonl",
        "sample 3: record 3 of a.jsonl",
        "samples 4-6: records 0-2 of b.jsonl",
        "samples 7-8: records 0-1 of c.jsonl",
        "sample 11: record 4 of c.jsonl",
    ]
