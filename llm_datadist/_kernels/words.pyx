"""Words that two processes share: the only atomics and fences of the library.

Three shapes of data are written here, each in one C call, since a Python writer that lost the GIL half-way would stall
every reader. Addresses come from the engine, which has bounded them by the size of the window they lie in.

* A *record* is ``generation, bytes, body..., checksum, generation``. Its writer makes the first word odd, release
  fence, body and end word, then the first word again with release. A reader that loads the first word with acquire,
  then the body, then (after an acquire fence) finds the first word unchanged and even has seen one whole record. No
  word of it was older: what the release published is visible after the acquire. Nor was any newer: had a load seen a
  word of a later writing, the two fences would make that writer's odd first word visible to the last load. And since
  no generation comes twice, the first word can't have changed and changed back.
* An *entry* is eight words, ordered in the same way. End word and checksum, which it lacks, only tell damage.
* The *index* is an open-addressing table of single words ``hash << 32 | entry + 1``. One release store inserts or
  removes. Only a rebuild moves words, under an odd epoch; a miss counts if the epoch was even and equal around it.

What is taken for granted: processes share the words coherently, as all memory of one machine is, and an aligned word is
never seen half written. Nothing else: each order that is needed is named where it is made, since x86 would hide the
lack of all but the full fences, and aarch64 would not.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from "atomics.h" nogil:
    uint64_t dd_load_acquire(const uint64_t *p)
    uint64_t dd_load_relaxed(const uint64_t *p)
    void dd_store_relaxed(uint64_t *p, uint64_t v)
    void dd_store_release(uint64_t *p, uint64_t v)
    uint32_t dd_load32_relaxed(const uint32_t *p)
    void dd_store32_relaxed(uint32_t *p, uint32_t v)
    void dd_acquire_fence()
    void dd_release_fence()
    void dd_full_fence()

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_mutexattr_t:
        pass
    int PTHREAD_MUTEX_ROBUST
    int PTHREAD_PROCESS_SHARED
    int pthread_mutexattr_init(pthread_mutexattr_t *)
    int pthread_mutexattr_destroy(pthread_mutexattr_t *)
    int pthread_mutexattr_setrobust(pthread_mutexattr_t *, int)
    int pthread_mutexattr_setpshared(pthread_mutexattr_t *, int)
    int pthread_mutex_init(pthread_mutex_t *, const pthread_mutexattr_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef enum Layout:
    ENTRY_WORDS = 8
    RECORD_FRAME = 4          # generation, bytes, checksum, end generation
    TOMBSTONE = 0xFFFFFFFF    # hash 0, entry 2**32 - 2: never a real entry


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    x ^= x >> 30
    x *= <uint64_t>0xbf58476d1ce4e5b9
    x ^= x >> 27
    x *= <uint64_t>0x94d049bb133111eb
    return x ^ (x >> 31)


cdef inline uint64_t hash3(uint64_t a, uint64_t b, uint64_t c) noexcept nogil:
    return mix(mix(mix(a + <uint64_t>0x9e3779b97f4a7c15) + b) + c)


cdef uint64_t checksum(const uint64_t *words, int64_t n) noexcept nogil:
    cdef uint64_t total = <uint64_t>n
    cdef int64_t i
    for i in range(n):
        total = mix(total ^ words[i])
    return total


def load(size_t address):
    """Read a word (acquire)."""
    return dd_load_acquire(<const uint64_t *>address)


def store(size_t address, uint64_t value):
    """Write a word (release), then a full fence.

    The release: who sees the word also sees what this thread wrote before it, and what this thread read before it was
    read before anyone acts on the word. So a spent key or a cleared pin is proof that the copy is over. The fence:
    nothing that this thread reads later is older than the word, so who pins first and looks at the directory then,
    and an owner who retires first and looks at the pins then, can't miss each other.
    """
    dd_store_release(<uint64_t *>address, value)
    dd_full_fence()


def hold_life(size_t address):
    """Make a word that the kernel changes when the calling thread ends, however it ends; return its value until then.

    It is the first word of a robust mutex, which holds the owner's thread id. The kernel marks it while the thread
    goes, before anybody can learn of that in another way, and nothing needs to be asked to find out. `address` has room
    for a mutex. `release_life` must follow, in the same thread, before the memory goes.

    Raises
    ------
    OSError
        The system has no such mutexes.
    """
    cdef pthread_mutex_t *mutex = <pthread_mutex_t *>address
    cdef pthread_mutexattr_t attributes
    cdef int error = pthread_mutexattr_init(&attributes)
    if error == 0:
        error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)
        if error == 0:
            error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)
        if error == 0:
            error = pthread_mutex_init(mutex, &attributes)
        pthread_mutexattr_destroy(&attributes)
    if error == 0:
        error = pthread_mutex_lock(mutex)  # nobody else ever locks it, so this does not wait
    if error != 0:
        raise OSError(error, "a robust mutex can't be made")
    return dd_load_acquire(<const uint64_t *>address)


def release_life(size_t address):
    """Give up what `hold_life` made."""
    pthread_mutex_unlock(<pthread_mutex_t *>address)


def retire(size_t address, uint64_t generation):
    """Make the first word of a record or entry odd.

    The full fence orders it before whatever the owner does next with the memory. Its stores: a reader that has loaded
    any of them, and after an acquire fence loads the first word, finds it odd. Its loads of pins: see `pinned`.
    """
    dd_store_release(<uint64_t *>address, generation | 1)
    dd_full_fence()


def write_record(size_t address, uint64_t generation, const uint64_t[::1] body):
    """Publish a record in one call; return its size in bytes."""
    cdef uint64_t *p = <uint64_t *>address
    cdef int64_t n = body.shape[0], i
    if n == 0:
        raise ValueError("a record needs a body")
    dd_store_relaxed(p, generation | 1)
    dd_release_fence()
    dd_store_relaxed(p + 1, <uint64_t>((n + RECORD_FRAME) * 8))
    for i in range(n):
        dd_store_relaxed(p + 2 + i, body[i])
    dd_store_relaxed(p + 2 + n, checksum(&body[0], n))
    dd_store_relaxed(p + 3 + n, generation)
    dd_store_release(p, generation)
    return (n + RECORD_FRAME) * 8


def read_record(size_t address, int64_t limit):
    """Copy a record out: ``(generation, body)``, or None if it is absent, being written, or damaged.

    At most `limit` bytes from `address` are looked at, whatever the record says of its size.
    """
    cdef const uint64_t *p = <const uint64_t *>address
    cdef uint64_t *out
    cdef uint64_t generation, nbytes
    cdef int64_t n, i
    if limit < (RECORD_FRAME + 1) * 8:
        return None
    generation = dd_load_acquire(p)
    nbytes = dd_load_relaxed(p + 1)
    if generation & 1 or nbytes % 8 or nbytes > <uint64_t>limit or nbytes < (RECORD_FRAME + 1) * 8:
        return None
    n = <int64_t>(nbytes // 8) - RECORD_FRAME
    body = PyBytes_FromStringAndSize(NULL, n * 8)
    out = <uint64_t *>PyBytes_AS_STRING(body)
    for i in range(n):
        out[i] = dd_load_relaxed(p + 2 + i)
    cdef uint64_t total = dd_load_relaxed(p + 2 + n), tail = dd_load_relaxed(p + 3 + n)
    dd_acquire_fence()
    if dd_load_relaxed(p) != generation or tail != generation or checksum(out, n) != total:
        return None
    return generation, body


def write_entry(size_t address, uint64_t generation, uint64_t kind, uint64_t ident, uint64_t model,
                uint64_t record, uint64_t slot, uint64_t tags, uint64_t memory_generation):
    """Publish an entry in one call."""
    cdef uint64_t *p = <uint64_t *>address
    dd_store_relaxed(p, generation | 1)
    dd_release_fence()
    dd_store_relaxed(p + 1, kind)
    dd_store_relaxed(p + 2, ident)
    dd_store_relaxed(p + 3, model)
    dd_store_relaxed(p + 4, record)
    dd_store_relaxed(p + 5, slot)
    dd_store_relaxed(p + 6, tags)
    dd_store_relaxed(p + 7, memory_generation)
    dd_store_release(p, generation)


def read_entry(size_t address):
    """Copy an entry out: its eight words, generation first, or None if it is absent or being written."""
    cdef const uint64_t *p = <const uint64_t *>address
    cdef uint64_t w[8]
    cdef int i
    w[0] = dd_load_acquire(p)
    for i in range(1, 8):
        w[i] = dd_load_relaxed(p + i)
    dd_acquire_fence()
    if w[0] & 1 or dd_load_relaxed(p) != w[0]:
        return None
    return w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]


def index_insert(size_t index, uint64_t capacity, uint64_t kind, uint64_t ident, uint64_t model, uint64_t entry):
    """Put an entry into the index; return whether an empty word was used (else a removed one).

    `capacity` is a power of two, and the caller keeps at least half of the words empty.
    """
    cdef uint64_t *words = <uint64_t *>index
    cdef uint64_t h = hash3(kind, ident, model), mask = capacity - 1, i = h & mask, probe, word
    for probe in range(capacity):
        word = dd_load_relaxed(words + i)
        if word == 0 or word == TOMBSTONE:
            # Release: who finds the word (acquire) also finds the entry that it names, as it was written before.
            dd_store_release(words + i, (h >> 32 << 32) | (entry + 1))
            return word == 0
        i = (i + 1) & mask
    raise RuntimeError("the index is full")


def index_remove(size_t index, uint64_t capacity, uint64_t kind, uint64_t ident, uint64_t model, uint64_t entry):
    """Take an entry out of the index; return whether it was there."""
    cdef uint64_t *words = <uint64_t *>index
    cdef uint64_t h = hash3(kind, ident, model), mask = capacity - 1, i = h & mask, probe, word
    cdef uint64_t wanted = (h >> 32 << 32) | (entry + 1)
    for probe in range(capacity):
        word = dd_load_relaxed(words + i)
        if word == 0:
            return False
        if word == wanted:
            # The release of `retire`, which follows, keeps this before the odd entry: who has found the entry odd
            # (acquire) and looks again does not find the word again.
            dd_store_relaxed(words + i, TOMBSTONE)
            return True
        i = (i + 1) & mask
    return False


def index_rebuild(size_t epoch, size_t capacity_word, size_t index, uint64_t old_capacity, uint64_t new_capacity,
                  size_t entries):
    """Write the index anew without its removed words, in one call under an odd epoch.

    The release fence keeps the odd epoch before all other stores: who has found one of these, and after an acquire
    fence loads the epoch, sees that it has changed. It also keeps the entries, written long before, ahead of the words
    that name them. The last release keeps the stores before the even epoch, which `find` acquires first of all.
    """
    cdef uint64_t *words = <uint64_t *>index
    cdef uint64_t live = 0, i, at, word, h, mask = new_capacity - 1, now
    cdef const uint64_t *entry
    cdef uint64_t *kept = <uint64_t *>malloc(old_capacity * 8)
    if kept == NULL:
        raise MemoryError
    for i in range(old_capacity):
        word = dd_load_relaxed(words + i)
        if word != 0 and word != TOMBSTONE:
            kept[live] = word
            live += 1
    if live * 2 > new_capacity:
        free(kept)
        raise RuntimeError("the new index is too small")
    now = dd_load_relaxed(<uint64_t *>epoch)
    dd_store_relaxed(<uint64_t *>epoch, now | 1)
    dd_release_fence()
    dd_store_relaxed(<uint64_t *>capacity_word, new_capacity)
    for i in range(old_capacity if old_capacity > new_capacity else new_capacity):
        dd_store_relaxed(words + i, 0)
    for i in range(live):
        entry = <const uint64_t *>entries + ((kept[i] & <uint64_t>0xFFFFFFFF) - 1) * <uint64_t>ENTRY_WORDS
        h = hash3(entry[1], entry[2], entry[3])
        at = h & mask
        while dd_load_relaxed(words + at) != 0:
            at = (at + 1) & mask
        dd_store_relaxed(words + at, kept[i])
    dd_store_release(<uint64_t *>epoch, (now | 1) + 1)
    free(kept)


def find(size_t epoch, size_t capacity_word, size_t index, uint64_t largest, size_t entries, uint64_t entry_count,
         uint64_t kind, uint64_t ident, uint64_t model):
    """Look a key up in an index that another process may be changing.

    Returns
    -------
    tuple, None or False
        ``(entry, generation, record, slot, tags, memory generation)``; None if the key is not there;
        False if the index or the entry was being written, or is not sane: look again.
    """
    cdef const uint64_t *words = <const uint64_t *>index
    cdef const uint64_t *e
    cdef uint64_t before = dd_load_acquire(<const uint64_t *>epoch)
    cdef uint64_t capacity = dd_load_relaxed(<const uint64_t *>capacity_word)
    cdef uint64_t h = hash3(kind, ident, model), high = h >> 32, i, probe, word, number
    cdef uint64_t generation, record, slot, tags, memory
    cdef bint same, unsettled = False
    if before & 1 or capacity == 0 or capacity > largest or capacity & (capacity - 1):
        return False
    i = h & (capacity - 1)
    for probe in range(capacity):
        word = dd_load_acquire(words + i)
        if word == 0:
            break
        if word >> 32 == high and word != TOMBSTONE:
            number = (word & 0xFFFFFFFF) - 1
            if number < entry_count:
                e = <const uint64_t *>entries + number * <uint64_t>ENTRY_WORDS
                generation = dd_load_acquire(e)
                same = (dd_load_relaxed(e + 1) == kind and dd_load_relaxed(e + 2) == ident
                        and dd_load_relaxed(e + 3) == model)
                record = dd_load_relaxed(e + 4)
                slot = dd_load_relaxed(e + 5)
                tags = dd_load_relaxed(e + 6)
                memory = dd_load_relaxed(e + 7)
                dd_acquire_fence()  # as in read_entry
                if same and not generation & 1 and dd_load_relaxed(e) == generation:
                    return number, generation, record, slot, tags, memory
                # Found, but not whole: it is being written anew, so this is no proof that the key is absent.
                unsettled = unsettled or same
        i = (i + 1) & (capacity - 1)
    # A key that is not there: no rebuild may have moved its word past this search, so the loads of words come before
    # this one of the epoch. A key that is found needs no epoch, only its entry whole, as above.
    dd_acquire_fence()
    if unsettled or dd_load_relaxed(<const uint64_t *>epoch) != before:
        return False
    return None


def list_entries(size_t epoch, size_t capacity_word, size_t index, uint64_t largest, size_t entries,
                 uint64_t entry_count, uint64_t kind):
    """Give all entries of a kind, as `find` gives one; False if the index was being rebuilt or is not sane."""
    cdef const uint64_t *words = <const uint64_t *>index
    cdef uint64_t before = dd_load_acquire(<const uint64_t *>epoch)
    cdef uint64_t capacity = dd_load_relaxed(<const uint64_t *>capacity_word)
    cdef uint64_t i, word, number
    cdef list found = []
    if before & 1 or capacity == 0 or capacity > largest or capacity & (capacity - 1):
        return False
    for i in range(capacity):
        word = dd_load_acquire(words + i)
        number = (word & <uint64_t>0xFFFFFFFF) - 1
        if word == 0 or word == TOMBSTONE or number >= entry_count:
            continue
        entry = read_entry(entries + <size_t>(number * ENTRY_WORDS * 8))
        if entry is not None and entry[1] == kind:
            found.append((number, entry[0], entry[4], entry[5], entry[6], entry[7]))
    dd_acquire_fence()
    if dd_load_relaxed(<const uint64_t *>epoch) != before:
        return False
    return found


def mark_tags(size_t tags, const uint32_t[::1] tensors, uint32_t tag, int64_t total):
    """Write the tag of each pulled tensor, then say whether all `total` tags are there now.

    The full fence stands between own tags and the others': of two decoders that finish the last two parts at the same
    time at least one sees all tags, whichever order their stores become visible in. That one will write the word that
    lets the owner use the memory again, so it also answers for the other's loads: each keeps its loads of the copy
    before its tags (the release fence), and sees tags before what it writes then (the acquire fence).
    """
    cdef uint32_t *p = <uint32_t *>tags
    cdef int64_t i
    for i in range(tensors.shape[0]):
        if tensors[i] >= <uint32_t>total:
            raise ValueError(f"tensor {tensors[i]} is not below {total}")
    dd_release_fence()
    for i in range(tensors.shape[0]):
        dd_store32_relaxed(p + tensors[i], tag)
    dd_full_fence()
    for i in range(total):
        if dd_load32_relaxed(p + i) != tag:
            return False
    dd_acquire_fence()
    return True


def clear(size_t address, int64_t nbytes):
    """Zero a range of words that no reader has been told of yet.

    The fence keeps the zeros before the word that will tell of them, whoever writes it.
    """
    cdef int64_t i
    for i in range(nbytes // 4):
        dd_store32_relaxed(<uint32_t *>address + i, 0)
    dd_full_fence()


def pinned(size_t pins, int64_t slots, uint64_t generation):
    """Of pin words 16 bytes apart, give the numbers of those that hold a generation.

    The caller has made the generation odd in the directory, with a full fence, before it looks. A writer pins, fence,
    and looks at the directory. So either this load sees the pin, or the writer sees the odd word. A pin that was there
    and is cleared: acquire meets the release of `store`, so all that was written under it is in place before what the
    owner does next.
    """
    cdef const uint64_t *p = <const uint64_t *>pins
    cdef int64_t i
    cdef list found = []
    for i in range(slots):
        if dd_load_acquire(p + 2 * i) == generation:
            found.append(i)
    return found


def equal_words(size_t base, const uint64_t[::1] pairs):
    """Of flat (word number, value) pairs, give the positions of those whose word holds the value.

    Acquire: of a spent key, the reads of who spent it are over before the owner uses the memory again.
    """
    cdef const uint64_t *p = <const uint64_t *>base
    cdef Py_ssize_t i
    cdef list found = []
    for i in range(pairs.shape[0] // 2):
        if dd_load_acquire(p + pairs[2 * i]) == pairs[2 * i + 1]:
            found.append(i)
    return found
