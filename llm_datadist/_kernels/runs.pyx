"""Index lists become merged runs: bounds and overflow are checked here, once, before any address is made."""

import sys

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.list cimport PyList_AsTuple
from cpython.long cimport PyLong_AsUnsignedLongLongMask
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef extern from "Python.h":
    # Borrowed pointers: nothing here may run Python code while they are in use.
    PyObject **PySequence_Fast_ITEMS(object)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)
    bint exact_int "PyLong_CheckExact"(PyObject *)
    long long PyLong_AsLongLongAndOverflow(PyObject *, int *)


cdef extern from * nogil:
    bint add_overflows "__builtin_add_overflow"(int64_t, int64_t, int64_t *)
    bint add_overflows_unsigned "__builtin_add_overflow"(uint64_t, uint64_t, uint64_t *)
    bint multiply_overflows "__builtin_mul_overflow"(int64_t, int64_t, int64_t *)


cdef tuple NATIVE_ORDER = ("@", "=", "<" if sys.byteorder == "little" else ">")
cdef object UINT64_MAX = 2**64 - 1


# ---- numbers


cdef str shown(object value):
    """Print a number that may have thousands of digits."""
    bits = value.bit_length()
    return str(value) if bits <= 128 else f"an int of {bits} bits"


cdef int64_t whole(object value, str name, int64_t least) except? -1:
    """Convert a number that must be an int from `least` (0 or 1) to 2**63 - 1."""
    cdef int overflow
    cdef int64_t quick = -1
    if exact_int(<PyObject *> value):
        quick = PyLong_AsLongLongAndOverflow(<PyObject *> value, &overflow)
    if quick >= least:
        return quick
    number = PyNumber_Index(value)
    if not least <= number <= INT64_MAX:
        raise ValueError(f"{name} is {shown(number)}; allowed are {least} to 2**63 - 1")
    return number


cdef uint64_t unsigned(object value, str name) except? 0:
    cdef int overflow
    cdef int64_t quick
    if exact_int(<PyObject *> value):
        quick = PyLong_AsLongLongAndOverflow(<PyObject *> value, &overflow)
        if quick >= 0:
            return quick
    number = PyNumber_Index(value)
    if not 0 <= number <= UINT64_MAX:
        raise ValueError(f"{name} is {shown(number)}; allowed are 0 to 2**64 - 1")
    return number


# ---- indices


@cython.final
@cython.freelist(8)
cdef class Indices:
    """Block indices, copied into C once. `maximum` is -1 when empty; indices >= 2**63 are held as 2**63 - 1."""

    def __cinit__(self):
        self.top = -1
        self.items = self.few

    def __dealloc__(self):
        if self.items != self.few:
            PyMem_Free(self.items)

    @property
    def maximum(self):
        return self.top

    def __len__(self):
        return self.count

    def tolist(self):
        return [min(at(self, i), <uint64_t> INT64_MAX) for i in range(self.count)]


cdef inline uint64_t at(Indices indices, Py_ssize_t i) noexcept:
    if indices.items != NULL:
        return indices.items[i]
    return indices.first + <uint64_t> i * indices.step


cdef Indices room_for(Py_ssize_t count):
    cdef Indices made = Indices.__new__(Indices)
    if count > <Py_ssize_t> (sizeof(made.few) // sizeof(int64_t)):
        made.items = <int64_t *> PyMem_Malloc(count * sizeof(int64_t))
        if made.items == NULL:
            made.items = made.few
            raise MemoryError
    made.count = count
    return made


cdef int64_t element(object value, str name, Py_ssize_t position) except -1:
    """Convert one element; runs Python code when it has an ``__index__`` of its own."""
    cdef str kind = type(value).__name__
    # By name, as numpy's bool (once "bool_") is no subclass of bool and has an __index__ up to numpy 2.2.
    if kind in ("bool", "bool_") or not PyIndex_Check(value):
        raise TypeError(f"{name}[{position}] must be an int, got {kind}")
    try:
        number = PyNumber_Index(value)
    except TypeError as error:
        raise TypeError(f"{name}[{position}] must be an int, got {kind}: {error}") from error
    if not 0 <= number <= UINT64_MAX:
        raise out_of_range(name, position, number)
    return min(number, INT64_MAX)


cdef object out_of_range(str name, object position, object number):
    return ValueError(f"{name}[{position}] is {shown(number)}; allowed are 0 to 2**64 - 1")


cdef Indices read_items(object values, str name):
    cdef Py_ssize_t i, count = PySequence_Fast_GET_SIZE(values)
    cdef Indices made = room_for(count)
    cdef PyObject **items = PySequence_Fast_ITEMS(values)
    cdef tuple snapshot = None
    cdef int64_t number, top = -1
    cdef int overflow
    for i in range(count):
        number = -1
        if exact_int(items[i]):
            number = PyLong_AsLongLongAndOverflow(items[i], &overflow)
        if number < 0:
            if snapshot is None and isinstance(values, list):
                # From here on Python code may run and change the list: go on with the list as it is now.
                snapshot = PyList_AsTuple(values)
                items = PySequence_Fast_ITEMS(snapshot)
            number = element(<object> items[i], name, i)
        made.items[i] = number
        if number > top:
            top = number
    made.top = top
    return made


cdef Indices read_range(object values, str name):
    cdef Indices made = Indices.__new__(Indices)
    if not values:
        return made
    first, last, step = values.start, next(reversed(values)), values.step
    if first < 0 or first > UINT64_MAX:
        raise out_of_range(name, 0, first)
    if last < 0 or last > UINT64_MAX:
        # The bound that is crossed, and the first element beyond it.
        position = (first if last < 0 else UINT64_MAX - first) // abs(step) + 1
        raise out_of_range(name, position, values[position])
    if (last - first) // step >= sys.maxsize:
        raise ValueError(f"{name} has more than {sys.maxsize} elements")
    made.items = NULL
    made.count = len(values)
    made.first = first
    made.step = PyLong_AsUnsignedLongLongMask(step)
    made.top = min(max(first, last), INT64_MAX)
    return made


cdef Indices read_buffer(object values, str name):
    cdef Py_buffer view
    try:
        PyObject_GetBuffer(values, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    except (BufferError, ValueError) as error:  # numpy answers ValueError for a dtype that has no format
        raise TypeError(f"{name} must hold ints, got {type(values).__name__}: {error}") from error
    try:
        return read_view(&view, name)
    finally:
        PyBuffer_Release(&view)


cdef Indices read_view(Py_buffer *view, str name):
    cdef Py_ssize_t i
    cdef Py_ssize_t width = view.itemsize
    cdef char *item = <char *> view.buf
    cdef str text = "B" if view.format == NULL else view.format.decode("latin-1")
    cdef str code = text[1:] if text[:1] in NATIVE_ORDER else text
    cdef bint signed = code in ("b", "h", "i", "l", "q", "n")
    if not (signed or code in ("B", "H", "I", "L", "Q", "N")) or width not in (1, 2, 4, 8):
        raise TypeError(f"{name} must hold native integers, got buffer format {text!r}")
    if view.ndim != 1:
        raise TypeError(f"{name} must have one dimension, got {view.ndim}")
    # ctypes leaves the strides out, though they were asked for.
    cdef Py_ssize_t stride = width if view.strides == NULL else view.strides[0]
    cdef Indices made = room_for(view.shape[0])
    cdef int64_t number
    # The format tells the sign only: some exporters write "l" for 4 bytes and some for 8.
    for i in range(made.count):
        number = load_signed(item, width) if signed else load_unsigned(item, width)
        if number < 0:
            if signed:
                raise out_of_range(name, i, number)
            number = INT64_MAX
        made.items[i] = number
        if number > made.top:
            made.top = number
        item += stride
    return made


# Items of a buffer may lie at any address: memcpy of a fixed size is an unaligned load.
cdef inline int64_t load_signed(const char *item, Py_ssize_t width) noexcept:
    cdef int8_t one
    cdef int16_t two
    cdef int32_t four
    cdef int64_t eight
    if width == 8:
        memcpy(&eight, item, 8)
        return eight
    if width == 4:
        memcpy(&four, item, 4)
        return four
    if width == 2:
        memcpy(&two, item, 2)
        return two
    memcpy(&one, item, 1)
    return one


cdef inline int64_t load_unsigned(const char *item, Py_ssize_t width) noexcept:
    cdef uint8_t one
    cdef uint16_t two
    cdef uint32_t four
    if width == 4:
        memcpy(&four, item, 4)
        return four
    if width == 2:
        memcpy(&two, item, 2)
        return two
    if width == 1:
        memcpy(&one, item, 1)
        return one
    return load_signed(item, 8)  # 2**63 and above come out negative


def indices(values, str name not None):
    """Copy a list of indices in one pass.

    Accepts list, tuple, range and one-dimensional integer buffers (any stride, any native integer type);
    elements are int or have ``__index__``.

    Raises
    ------
    TypeError
        Another container; an element that is bool, float, str or has no ``__index__``. Names `name`, position, type.
    ValueError
        A negative element or one above 2**64 - 1. Names `name`, position and value.
    """
    if isinstance(values, (list, tuple)):
        return read_items(values, name)
    if isinstance(values, range):
        return read_range(values, name)
    # bytes are text to most callers; who means numbers can wrap them in a memoryview.
    if PyObject_CheckBuffer(values) and not isinstance(values, (bytes, bytearray)):
        return read_buffer(values, name)
    raise TypeError(
        f"{name} must be a list, tuple, range or one-dimensional integer buffer, got {type(values).__name__}"
    )


# ---- runs


@cython.final
@cython.freelist(8)
cdef class Runs:
    """Merged (source offset, destination offset, bytes) runs inside one tensor pair."""

    def __cinit__(self):
        self.items = self.few
        self.room = sizeof(self.few) // sizeof(dd_run)

    def __dealloc__(self):
        if self.items != self.few:
            PyMem_Free(self.items)

    @property
    def nbytes(self):
        """Bytes of one tensor pair."""
        return self.total()

    def __len__(self):
        return self.count

    def tolist(self):
        cdef Py_ssize_t i
        cdef int64_t begin = 0
        result = []
        for i in range(self.count):
            result.append((self.items[i].source, self.items[i].destination, self.items[i].end - begin))
            begin = self.items[i].end
        return result

    cdef int64_t total(self) noexcept:
        return self.items[self.count - 1].end if self.count else 0

    cdef dd_run *append(self) except NULL:
        if self.count == self.room:
            self.resize(2 * self.room)
        self.count += 1
        return &self.items[self.count - 1]

    cdef int trim(self) except -1:
        """Give back the room that growing left over."""
        if self.items != self.few and self.count < self.room:
            self.resize(self.count)
        return 0

    cdef int resize(self, Py_ssize_t room) except -1:
        cdef dd_run *held = NULL if self.items == self.few else self.items
        cdef dd_run *moved = <dd_run *> PyMem_Realloc(held, room * sizeof(dd_run))
        if moved == NULL:
            raise MemoryError
        if held == NULL:
            memcpy(moved, self.few, self.count * sizeof(dd_run))
        self.items = moved
        self.room = room
        return 0


cdef inline uint64_t mixed(uint64_t value) noexcept:
    """Spread the bits of an index, so that any regular pattern of indices fills a hash table evenly."""
    value ^= value >> 32
    value *= <uint64_t> 0x9E3779B97F4A7C15
    value ^= value >> 29
    value *= <uint64_t> 0xD6E8FEB86659FD93
    return value ^ (value >> 32)


cdef inline bint test_and_set(uint64_t *bits, uint64_t i) noexcept:
    cdef uint64_t bit = <uint64_t> 1 << (i & 63)
    cdef bint was = bits[i >> 6] & bit != 0
    bits[i >> 6] |= bit
    return was


cdef inline bint test_and_insert(uint64_t *table, uint64_t mask, uint64_t index) noexcept:
    """Open addressing; a slot holds the index + 1, 0 is free."""
    cdef uint64_t slot = mixed(index) & mask
    while table[slot] != 0:
        if table[slot] == index + 1:
            return True
        slot = (slot + 1) & mask
    table[slot] = index + 1
    return False


cdef bint in_order(Indices destination) noexcept:
    """Whether the indices strictly rise or strictly fall, so that none is repeated."""
    cdef Py_ssize_t i
    cdef bint rises = True, falls = True
    cdef uint64_t last, now
    if destination.items == NULL:
        return True
    for i in range(1, destination.count):
        last = at(destination, i - 1)
        now = at(destination, i)
        rises = rises and now > last
        falls = falls and now < last
        if not (rises or falls):
            return False
    return True


cdef uint64_t *overwritten(Indices destination, int64_t blocks) except? NULL:
    """Give a bitmap of the pairs whose destination comes again later in the list; NULL when there are none."""
    cdef Py_ssize_t i, j, count = destination.count
    cdef uint64_t index, mask = 0
    cdef uint64_t *lost = NULL
    cdef uint64_t *seen = NULL
    cdef bint tiny = count <= 16
    cdef bint dense = blocks <= 64 * count + 4096
    cdef bint again
    if in_order(destination):
        return NULL
    if not tiny:
        if dense:
            seen = <uint64_t *> PyMem_Calloc(blocks // 64 + 1, sizeof(uint64_t))
        else:
            mask = 32
            while mask < <uint64_t> (count + count // 3):
                mask *= 2
            seen = <uint64_t *> PyMem_Calloc(mask, sizeof(uint64_t))
            mask -= 1
        if seen == NULL:
            raise MemoryError
    try:
        for i in range(count - 1, -1, -1):
            index = at(destination, i)
            if tiny:
                again = False
                for j in range(i + 1, count):
                    again = again or at(destination, j) == index
            elif dense:
                again = test_and_set(seen, index)
            else:
                again = test_and_insert(seen, mask, index)
            if again:
                if lost == NULL:
                    lost = <uint64_t *> PyMem_Calloc(count // 64 + 1, sizeof(uint64_t))
                    if lost == NULL:
                        raise MemoryError
                test_and_set(lost, i)
    finally:
        PyMem_Free(seen)
    return lost


cdef int merge(Runs runs, Indices source, Indices destination, int64_t nbytes, const uint64_t *lost) except -1:
    """Append the pairs that are not lost, each to the run before it where it continues it upwards or downwards."""
    cdef Py_ssize_t i
    cdef int64_t begin = 0, end = 0, copied_from, copied_to
    cdef dd_run *run = NULL
    for i in range(source.count):
        if lost != NULL and lost[i >> 6] >> (i & 63) & 1:
            continue
        copied_from = at(source, i) * nbytes
        copied_to = at(destination, i) * nbytes
        if run != NULL and copied_from == run.source + (end - begin) and copied_to == run.destination + (end - begin):
            pass
        elif run != NULL and copied_from + nbytes == run.source and copied_to + nbytes == run.destination:
            run.source = copied_from
            run.destination = copied_to
        else:
            run = runs.append()
            run.source = copied_from
            run.destination = copied_to
            begin = end
        end += nbytes
        run.end = end
    return runs.trim()


def block_runs(
    Indices source not None, Indices destination not None, source_blocks, destination_blocks, block_bytes
):
    """Pair block lists element by element; neighbours are merged, of repeated destinations the last pair wins whole.

    Raises
    ------
    ValueError
        The lists differ in length, an index is not below its number of blocks, or a size is out of range.
    """
    cdef int64_t have = whole(source_blocks, "source_blocks", 0)
    cdef int64_t want = whole(destination_blocks, "destination_blocks", 0)
    cdef int64_t nbytes = whole(block_bytes, "block_bytes", 1)
    cdef int64_t size
    if source.count != destination.count:
        raise ValueError(f"{source.count} source indices do not pair with {destination.count} destination indices")
    if source.top >= have:
        raise ValueError(f"source index {source.top} is not below the number of source blocks, {have}")
    if destination.top >= want:
        raise ValueError(
            f"destination index {destination.top} is not below the number of destination blocks, {want}"
        )
    if multiply_overflows(max(have, want), nbytes, &size):
        raise ValueError(f"{max(have, want)} blocks of {nbytes} bytes are more than 2**63 - 1 bytes")
    cdef Runs runs = Runs.__new__(Runs)
    cdef uint64_t *lost = overwritten(destination, want)
    try:
        merge(runs, source, destination, nbytes, lost)
    finally:
        PyMem_Free(lost)
    runs.source_end = (source.top + 1) * nbytes
    runs.destination_end = (destination.top + 1) * nbytes
    return runs


def chunk_runs(Indices destination not None, destination_blocks, block_bytes, source_offset, source_bytes):
    """Cut a span into chunks of a block, the last as short as the span ends, and put each into its block.

    Fewer chunks than the span has are allowed. Of repeated destinations the last chunk wins.

    Raises
    ------
    ValueError
        More chunks than the span has, an index that is not below its number of blocks, or a size out of range.
    """
    cdef int64_t want = whole(destination_blocks, "destination_blocks", 0)
    cdef int64_t nbytes = whole(block_bytes, "block_bytes", 1)
    cdef int64_t begin = whole(source_offset, "source_offset", 0)
    cdef int64_t span = whole(source_bytes, "source_bytes", 0)
    cdef int64_t size, source_at, destination_at, next_source = 0, next_destination = 0, total = 0
    cdef Py_ssize_t i
    cdef dd_run *run = NULL
    cdef Runs runs = Runs.__new__(Runs)
    if destination.count > (span + nbytes - 1) // nbytes:
        raise ValueError(f"{destination.count} chunks of {nbytes} bytes are more than {span} bytes have")
    if destination.top >= want:
        raise ValueError(
            f"destination index {destination.top} is not below the number of destination blocks, {want}"
        )
    if multiply_overflows(want, nbytes, &size) or add_overflows(begin, span, &runs.source_end):
        raise ValueError(f"{want} blocks of {nbytes} bytes, or {span} bytes from {begin}, end above 2**63 - 1")
    cdef uint64_t *lost = overwritten(destination, want)
    try:
        for i in range(destination.count):
            if lost != NULL and lost[i >> 6] >> (i & 63) & 1:
                continue
            source_at = begin + i * nbytes
            destination_at = <int64_t> at(destination, i) * nbytes
            size = min(nbytes, span - i * nbytes)
            total += size
            runs.destination_end = max(runs.destination_end, destination_at + size)
            if run != NULL and source_at == next_source and destination_at == next_destination:
                run.end = total
            else:
                run = runs.append()
                run.source = source_at
                run.destination = destination_at
                run.end = total
            next_source = source_at + size
            next_destination = destination_at + size
    finally:
        PyMem_Free(lost)
    return runs


def span_runs(source_offset, destination_offset, nbytes):
    """Make one run.

    Raises
    ------
    ValueError
        A number is negative, or an end lies above 2**63 - 1.
    """
    cdef int64_t copied_from = whole(source_offset, "source_offset", 0)
    cdef int64_t copied_to = whole(destination_offset, "destination_offset", 0)
    cdef int64_t size = whole(nbytes, "nbytes", 0)
    cdef Runs runs = Runs.__new__(Runs)
    cdef dd_run *run
    if add_overflows(copied_from, size, &runs.source_end) or add_overflows(copied_to, size, &runs.destination_end):
        raise ValueError(f"{size} bytes from offset {copied_from} to offset {copied_to} end above 2**63 - 1")
    if size:
        run = runs.append()
        run.source = copied_from
        run.destination = copied_to
        run.end = size
    return runs


# ---- plans


@cython.final
cdef class Bases:
    """Base addresses of tensor pairs."""

    def __cinit__(self, source, destination):
        cdef Py_ssize_t i
        cdef tuple sources = tuple(source)
        cdef tuple destinations = tuple(destination)
        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} source addresses do not pair with {len(destinations)} destinations")
        self.allot(len(sources))
        for i in range(self.count):
            self.items[i].source = unsigned(sources[i], "source address")
            self.items[i].destination = unsigned(destinations[i], "destination address")
            self.source_top = max(self.source_top, self.items[i].source)
            self.destination_top = max(self.destination_top, self.items[i].destination)

    def __dealloc__(self):
        PyMem_Free(self.items)

    cdef int allot(self, Py_ssize_t count) except -1:
        """Make room for so many pairs, whose addresses are whatever was there."""
        self.items = <dd_base *> PyMem_Realloc(self.items, count * sizeof(dd_base))
        if self.items == NULL:
            raise MemoryError
        self.count = count
        return 0

    def __len__(self):
        return self.count

    def tolist(self):
        return [(self.items[i].source, self.items[i].destination) for i in range(self.count)]


@cython.final
@cython.freelist(8)
@cython.no_gc  # its members hold no objects, so there is no cycle to look for
cdef class Plan:
    """Runs, to be copied for each of the tensor pairs. Never expanded per tensor in memory.

    Raises
    ------
    ValueError
        The bytes of all tensors, or the furthest address, do not fit in their integers.
    """

    def __cinit__(self, Bases bases not None, Runs runs not None):
        cdef uint64_t end
        self.bases = bases
        self.runs = runs
        if multiply_overflows(bases.count, runs.total(), &self.nbytes):
            raise ValueError(f"{bases.count} tensors of {runs.total()} bytes are more than 2**63 - 1 bytes")
        if add_overflows_unsigned(bases.source_top, runs.source_end, &end) or add_overflows_unsigned(
            bases.destination_top, runs.destination_end, &end
        ):
            raise ValueError(
                f"offsets up to {max(runs.source_end, runs.destination_end)} from the bases end above 2**64 - 1"
            )

    cdef dd_plan view(self) noexcept:
        cdef dd_plan plan
        plan.bases = self.bases.items
        plan.runs = self.runs.items
        plan.run_count = self.runs.count
        plan.tensor_bytes = self.runs.total()
        return plan
