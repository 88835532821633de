"""What an owner publishes of a cache: a few numbers, and where the tensors lie."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t

from llm_datadist._kernels.runs cimport Bases, dd_base

# Words before the tensors: cache id, flags, devices, tensors of a device, slots, bytes of a tensor, keys.
cdef enum: HEAD = 7


@cython.final
@cython.freelist(8)
@cython.no_gc  # bytes hold no objects
cdef class Record:
    """One cache as published, in the words of its body; a reader's body comes from a peer, so it is checked.

    Raises
    ------
    ValueError
        The words contradict each other, so no owner can have written them.
    """

    cdef readonly uint64_t generation, cache_id, flags, devices, num_tensors, slots, tensor_bytes
    #: Bytes of one batch slot or block.
    cdef readonly uint64_t stride
    #: How many slots were given a key, or come before one that was.
    cdef readonly uint64_t key_count
    cdef readonly bytes body
    cdef const uint64_t *words

    def __cinit__(self, uint64_t generation, bytes body not None):
        cdef uint64_t size = PyBytes_GET_SIZE(body)
        cdef uint64_t count = size // 8
        self.body = body
        self.words = <const uint64_t *> PyBytes_AS_STRING(body)
        if size % 8 or count < HEAD:
            raise ValueError(f"has {size} bytes")
        self.generation = generation
        self.cache_id, self.flags, self.devices = self.words[0], self.words[1], self.words[2]
        self.num_tensors, self.slots, self.tensor_bytes = self.words[3], self.words[4], self.words[5]
        self.key_count = self.words[6]
        # Each is below 2**61 then, so that no product or sum overflows.
        if self.devices > count or self.num_tensors > count or self.key_count > count or count >= <uint64_t> 1 << 30:
            raise ValueError(f"of {size} bytes has {self.devices} x {self.num_tensors} tensors, {self.key_count} keys")
        if HEAD + 2 * self.devices * self.num_tensors + 2 * self.key_count != count:
            raise ValueError(f"of {size} bytes has {self.devices} x {self.num_tensors} tensors, {self.key_count} keys")
        if self.slots == 0 or self.tensor_bytes == 0 or self.tensor_bytes % self.slots or self.key_count > self.slots:
            raise ValueError(f"has {self.slots} slots, {self.key_count} keys, {self.tensor_bytes} bytes a tensor")
        self.stride = self.tensor_bytes // self.slots

    def __eq__(self, other):
        if not isinstance(other, Record):
            return NotImplemented
        return self.generation == (<Record> other).generation and self.body == (<Record> other).body

    __hash__ = None

    def __repr__(self):
        return (
            f"Record({self.generation}, cache {self.cache_id}, flags {self.flags}, {self.devices} x {self.num_tensors} "
            f"tensors of {self.slots} slots, {self.tensor_bytes} bytes)"
        )

    cdef tuple pairs(self, uint64_t first, uint64_t count):
        cdef uint64_t i
        return tuple([(self.words[first + 2 * i], self.words[first + 2 * i + 1]) for i in range(count)])

    @property
    def tensors(self):
        """(region, offset) of each tensor, device after device."""
        return self.pairs(HEAD, self.devices * self.num_tensors)

    def tensor(self, uint64_t position):
        """One element of `tensors`."""
        if position >= self.devices * self.num_tensors:
            raise IndexError(position)
        return self.words[HEAD + 2 * position], self.words[HEAD + 2 * position + 1]

    @property
    def keys(self):
        """(entry number + 1, binding generation) of each slot that was given a key; (0, 0) for a slot without."""
        return self.pairs(HEAD + 2 * self.devices * self.num_tensors, self.key_count)

    def key_of_slot(self, uint64_t slot):
        """One element of `keys`; (0, 0) for a slot behind them."""
        if slot >= self.key_count:
            return 0, 0
        cdef uint64_t at = HEAD + 2 * (self.devices * self.num_tensors + slot)
        return self.words[at], self.words[at + 1]

    def span(self):
        """(region, lowest offset, bytes from there to the end of the furthest tensor), if all lie in one region."""
        cdef uint64_t i, offset, count = self.devices * self.num_tensors
        cdef uint64_t lowest = <uint64_t> -1, furthest = 0
        if count == 0:
            return None
        for i in range(count):
            if self.words[HEAD + 2 * i] != self.words[HEAD]:
                return None
            offset = self.words[HEAD + 2 * i + 1]
            lowest = min(lowest, offset)
            furthest = max(furthest, offset)
        # Python's numbers, as the peer's may overflow.
        return self.words[HEAD], lowest, furthest - lowest + <object> self.tensor_bytes

    def bases(self, Py_ssize_t first, uint64_t lowest, uint64_t base, destination, Py_ssize_t to, Py_ssize_t stride,
              Py_ssize_t count):
        """Pair tensors of this cache with those at addresses.

        `count` of each device, from `first` on, are paired with those from `to` on of each `stride` addresses.
        The offset `lowest` of this cache is at address `base`.
        """
        cdef const uint64_t[::1] addresses = destination
        cdef Py_ssize_t device, i, tensors = self.num_tensors
        cdef Bases made
        cdef dd_base *item
        if not (
            0 <= first <= tensors
            and 0 <= count <= tensors - first
            and 0 <= to <= stride
            and count <= stride - to
            and addresses.shape[0] == <Py_ssize_t> self.devices * stride
        ):
            raise ValueError(f"tensors {first} and {to}, {count} each, of {tensors} and {addresses.shape[0]}")
        made = Bases.__new__(Bases, (), ())
        made.allot(self.devices * count)
        item = made.items
        for device in range(<Py_ssize_t> self.devices):
            for i in range(count):
                # Modulo 2**64, and bounded: whoever gives `base` has seen the whole span.
                item.source = base + (self.words[HEAD + 2 * (device * tensors + first + i) + 1] - lowest)
                item.destination = addresses[device * stride + to + i]
                made.source_top = max(made.source_top, item.source)
                made.destination_top = max(made.destination_top, item.destination)
                item += 1
        return made
