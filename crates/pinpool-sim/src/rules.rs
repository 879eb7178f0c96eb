//! The rules of both vendors.
//!
//! Each violation is written down as one line: the rule's id, and the call. `tests/devices/cuda/standin` and
//! `tests/devices/acl/standin.rs` break each on purpose. The columns CUDA and Ascend say what such a call gives; `-`: that vendor has no such rule. A
//! code with a question mark is a guess: the documentation says that the call fails, or nothing. 0: the call is made
//! all the same, since the library does not see to the rule, or since only pinpool's contract has it.
//!
//! | id | the program | CUDA | Ascend |
//! | --- | --- | --- | --- |
//! | INIT-1 | calls before the library is initialised | 3 | 0 |
//! | INIT-2 | ends the library, for all users | - | 0 |
//! | INIT-3 | calls when the library was ended | - | 100001? |
//! | INIT-4 | ends what is not initialised, or no more | - | 100037 |
//! | DEV-1 | resets a device that has contexts, streams or events, which are destroyed | - | 0 |
//! | CTX-1 | makes a call that needs a context where none is current (asking about an event, or whether a stream is captured, needs none) | 201 | 107002 |
//! | CTX-2 | uses a context that does not exist any more | 709 | 107002 |
//! | CTX-3 | pops where nothing was pushed | 201 | - |
//! | CTX-4 | releases a primary context more often than it was retained, or resets a device more often than it was set | 201 | 107002 |
//! | CTX-5 | uses one context's stream while another one is current, or its event on another's stream (Ascend: another device's), or memory of another context or device in a copy | 400, memory 1 | 107003, memory 107000? |
//! | CTX-6 | destroys a context that is not there, or a primary or default one | 201 | 107002 |
//! | STR-1 | names a stream that does not exist, or no more | 400 | 107017 |
//! | STR-2 | destroys a stream that has copies queued, which still run | 0 | 0 |
//! | STR-3 | names the per-thread default stream (handle 2), of which each thread has one of its own | the thread's | - |
//! | EVT-1 | names an event that does not exist, or no more | 400 | 107017 |
//! | EVT-2 | asks about an event that was never recorded: it is complete | 0 | 0 |
//! | EVT-3 | records an event again that is not complete: it covers the new place only | 0 | 0 |
//! | EVT-4 | destroys an event that is recorded and not complete | 0 | 0 |
//! | EVT-5 | has a stream wait for an event that was made without `ACL_EVENT_SYNC` | - | 207000 |
//! | MEM-1 | registers memory that overlaps what is registered | 712 | 507910 |
//! | MEM-2 | unregisters what is not registered, or not from its start | 713, and 1 inside of what is page-locked | 507911 |
//! | MEM-3 | registers nothing, or past the end of the address space | 1 | 107000? |
//! | MEM-4 | unregisters memory that a queued copy uses (CUDA's driver waits for that), or frees what is registered | 0 | 0 |
//! | MEM-5 | hands memory to a copy that is page-locked in part | 1 | 107000? |
//! | MEM-6 | names device memory that is not allocated or was freed, or leaves its allocation | 1 | 107000 |
//! | MEM-7 | frees what is not the start of an allocation | 1 | 107000? |
//! | MEM-8 | frees device memory that a queued copy uses (CUDA's driver waits for that) | 0 | 0 |
//! | HST-1 | frees host memory that the library did not allocate, or not from its start, or twice | 1 | 107000? |
//! | HST-2 | frees host memory that a queued copy uses (CUDA's driver waits for that) | 0 | 0 |
//! | HST-3 | registers memory of the driver's own | 1 | - |
//! | HST-4 | asks for the device's address of memory that is neither registered nor `cuMemHostAlloc`'s | 1 | - |
//! | HST-5 | registers memory that is not mapped, or cannot be written to and is not said to be only read | 1 | 107000? |
//! | HST-6 | has a copy write to memory that was registered as only read | 1 | - |
//! | HST-7 | passes flags that do not exist | 1 | - |
//! | HST-8 | registers as only read where the device cannot | 801 | - |
//! | HST-9 | allocates managed memory on a device that does not share it with a working host | 0 | - |
//! | HST-10 | frees host memory that a stream used, which only an event was asked about since (freeing was seen to fail) | - | 0 |
//! | REG-1 | registers memory that does not begin or end with a page of 4 KiB | - | 507899 |
//! | CPY-1 | copies in a way that there is not | - | 100000 |
//! | CPY-2 | copies in a way that does not fit where the memory is | - | 107000 |
//! | CPY-3 | copies asynchronously from host to host, on a host | - | 207000 |
//! | CPY-4 | hands memory that is not page-locked to an asynchronous copy: the bytes are wrong | - | 0 |
//! | CPY-5 | copies asynchronously from or to what is on no multiple of 64 | - | 0 |
//! | CPY-6 | copies or sets at once what something queued writes, or reads where it is written | - | 0 |
//! | CPY-7 | copies from or to the device's address of registered memory | - | 107000? |
//! | CPY-8 | copies or sets more than it says there is room for | - | 107000 |
//! | CPY-9 | says that there is more room than there is | - | 0 |
//! | SEG-1 | copies a part of a block that ends nearer to the block's end than `ALIGN_UP(len, 32) + 32` | - | 0 |
//! | SEG-2 | the same, to what a queued copy uses (only if told that each copy is of a whole segment) | - | 0 |
//! | CAP-1 | makes an unsafe call while a capture forbids it, and spoils it | 900 | - |
//! | CAP-2 | synchronises or waits on a capturing stream from outside, or asks for its number, and spoils the capture | 900 | - |
//! | CAP-3 | asks about an event that was recorded in a capture | 907 | - |
//! | CAP-4 | ends a capture on another thread than it was begun on, where that matters | 908 | - |
//! | CAP-5 | uses the legacy default stream while a blocking stream of its context is captured, and spoils the capture | 906 | - |
//! | CAP-6 | makes a capturing stream wait for an event of outside, and spoils the capture | 905 | - |
//! | PTR-1 | names memory of the device-side heap in a copy | 1 | - |
//! | PTR-2 | asks for attributes of an address that there are not, or for none | 1 | - |
//! | HEAP-1 | sets the heap's limit when a module that uses the heap is loaded | 1 | - |
//! | POOL-1 | has a copy run on memory in stream order before the stream has reached the allocation | 0 | - |
//! | POOL-4 | frees memory in stream order that a copy uses which is not ordered before: the copy runs first | 0 | - |
//! | GRA-1 | makes a call from a user object's destructor | 800 | - |
//! | GRA-2 | makes a user object without destructor, without references, or without the flag that must be given | 1 | - |
//! | GRA-3 | names a graph, an executable graph or a user object that does not exist, or no more | 1 | - |
//! | GRA-4 | releases more references than a user object has, or destroys a graph that is being captured | 1 | - |
//! | BAT-1 | submits a batch of copies to the legacy default stream | 1 | - |
//! | BAT-2 | has a copy of no bytes in a batch: those before it are queued | 1 | - |
//! | BAT-3 | submits a batch to a stream that is captured: the capture goes on | 900 | - |
//! | BAT-4 | has a copy in a batch write where another one reads or writes: they run, in no fixed order | 0 | - |
//! | BAT-5 | has a copy in a batch without attributes, or attributes that do not exist | 1 | - |
//! | BAT-6 | submits batches on one context from two threads at once (drivers then lose the device now and then) | 0 | - |
//! | BAT-7 | names registered memory in a batch by the host's address where the device has another: the context is lost | 700 | - |
//! | KER-1 | loads a module without pinpool's two kernels | 218 | - |
//! | KER-2 | names a module or function that does not exist, or no more | 400 | - |
//! | KER-3 | asks for a function that the module does not have | 500 | - |
//! | KER-4 | launches a kernel in another shape than pinpool's | 1 | - |
//! | KER-5 | has a kernel touch what is no device memory of its context, or hands it more runs than it takes: the context is lost when it runs | 700, and 716 for a table that is not aligned | - |
//! | KER-6 | has a row of a launch meet what another row writes: they run, in no fixed order | 0 | - |
//! | KER-7 | launches on a stream that is captured, which the driver makes a node and this one does not | 0 | - |
//! | KER-8 | unloads a module whose kernel is queued: the kernel runs first | 0 | - |
//! | ARG-1 | passes null where something is read or written | 1 | 100000 |
//! | ARG-2 | passes flags, sizes, policies or timeouts that do not exist | - | 100000, and 107000 for timeouts |
