"""Numbers of samples or blocks, many at a time."""

import numpy

Indices = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]
