//! The benches' own binding of the CUDA driver. It uses no code of the crate, so a comparison is with the driver alone.
//!
//! The library is the one that the pool loads: `libcuda.so.1`, or the one that `PINPOOL_LIBCUDA` names. The primary
//! context of device 0 is retained for the rest of the process, since the pool and frameworks share it. Every call's
//! result is checked; an error ends the bench with the call's name and the driver's name for the code. The tests' simulated
//! driver lacks some of the calls: with it a bench runs as without a GPU.
//!
//! The host memory here is pinned in the same way as the pool's: mapped, touched, and registered for every context. In
//! the order of the file: handles, the table of calls, [`Driver`], host memory, and [`find`], which a bench calls
//! first.
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use libloading::Library;

/// cuda.h: CU_MEMHOSTREGISTER_PORTABLE, and CU_MEMHOSTALLOC_PORTABLE, which is the same number.
const PORTABLE: c_uint = 1;
/// cuda.h: CU_STREAM_NON_BLOCKING.
const NON_BLOCKING: c_uint = 1;
/// cuda.h: CU_EVENT_BLOCKING_SYNC.
const BLOCKING_SYNC: c_uint = 1;
/// cuda.h: CU_EVENT_DISABLE_TIMING.
const DISABLE_TIMING: c_uint = 2;
const NOT_READY: u32 = 600;

/// A kernel whose threads read the GPU's clock until a number of nanoseconds has passed.
const SPIN: &CStr = c"
.version 6.3
.target sm_75
.address_size 64

.visible .entry spin(.param .u64 nanos)
{
    .reg .pred %again;
    .reg .u64 %limit, %begin, %now;
    ld.param.u64 %limit, [nanos];
    mov.u64 %begin, %globaltimer;
turn:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %again, %now, %limit;
    @%again bra turn;
    ret;
}
";

/// A stream's handle.
#[derive(Clone, Copy)]
pub struct Stream(usize);

/// An event's handle.
#[derive(Clone, Copy)]
pub struct Event(usize);

/// An address on the device.
#[derive(Clone, Copy)]
pub struct Address(pub u64);

/// A kernel's handle.
#[derive(Clone, Copy)]
pub struct Kernel(usize);

macro_rules! table {
    ($($name:ident = $symbol:literal : fn($($arg:ty),*);)*) => {
        struct Api {
            $($name: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self, String> {
                // SAFETY: the driver API's symbols with the signatures of cuda.h, in a library that is never unloaded.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!($symbol, "\0").as_bytes())
                            .map_err(|_| format!("the driver lacks {}", $symbol))?,)*
                    })
                }
            }
        }
    };
}

table! {
    init = "cuInit": fn(c_uint);
    version = "cuDriverGetVersion": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    error_name = "cuGetErrorName": fn(u32, *mut *const c_char);
    retain = "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int);
    ctx_set = "cuCtxSetCurrent": fn(*mut c_void);
    register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    unregister = "cuMemHostUnregister": fn(*mut c_void);
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    stream_create = "cuStreamCreate": fn(*mut *mut c_void, c_uint);
    event_create = "cuEventCreate": fn(*mut *mut c_void, c_uint);
    event_record = "cuEventRecord": fn(*mut c_void, *mut c_void);
    event_query = "cuEventQuery": fn(*mut c_void);
    upload = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, *mut c_void);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    event_synchronize = "cuEventSynchronize": fn(*mut c_void);
    host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    module_load = "cuModuleLoadData": fn(*mut *mut c_void, *const c_void);
    module_function = "cuModuleGetFunction": fn(*mut *mut c_void, *mut c_void, *const c_char);
    launch = "cuLaunchKernel": fn(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
                                  *mut c_void, *mut *mut c_void, *mut *mut c_void);
}

/// The driver, with device 0's primary context.
pub struct Driver {
    library: ManuallyDrop<Library>,
    api: Api,
    context: usize,
    device: c_int,
}

impl Driver {
    /// Loads the driver and makes the context current on this thread.
    ///
    /// # Errors
    /// A text that says what is missing.
    pub fn open() -> Result<&'static Self, String> {
        let named = std::env::var_os("PINPOOL_LIBCUDA").filter(|path| !path.is_empty());
        let file = named.unwrap_or_else(|| "libcuda.so.1".into());
        // SAFETY: libcuda's initialisers have no preconditions; a user that names another library vouches for it.
        let library = unsafe { Library::new(&file) }.map_err(|error| error.to_string())?;
        // Never unloaded: the driver has threads of its own.
        let library = ManuallyDrop::new(library);
        let api = Api::resolve(&library)?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: writes handles.
        let code = unsafe {
            match ((api.init)(0), (api.device_get)(&raw mut device, 0)) {
                (0, 0) => (api.retain)(&raw mut context, device),
                (0, code) | (code, _) => code,
            }
        };
        let driver = Self { library, api, context: context as usize, device };
        if code != 0 {
            return Err(format!("the driver cannot be used: {}", driver.text(code)));
        }
        driver.enter();
        Ok(Box::leak(Box::new(driver)))
    }

    fn text(&self, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: writes null or a string that lives as long as the library.
        unsafe {
            (self.api.error_name)(code, &raw mut text);
            if text.is_null() {
                code.to_string()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    }

    #[inline(always)]
    fn check(&self, call: &str, code: u32) {
        if code != 0 {
            self.failed(call, code);
        }
    }

    #[cold]
    #[inline(never)]
    fn failed(&self, call: &str, code: u32) -> ! {
        panic!("{call} failed with {}", self.text(code));
    }

    /// The device's name, such as `NVIDIA H200, driver for CUDA 13.0`.
    pub fn name(&self) -> String {
        let mut version = 0;
        // SAFETY: writes a number.
        self.check("cuDriverGetVersion", unsafe { (self.api.version)(&raw mut version) });
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: writes at most that many bytes, the last of them zero.
        self.check("cuDeviceGetName", unsafe { (self.api.device_name)(name.as_mut_ptr(), 127, self.device) });
        // SAFETY: the text ends with a zero, in its last byte at the latest.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        format!("{name}, driver for CUDA {}.{}", version / 1000, version % 1000 / 10)
    }

    /// Makes the context current on this thread.
    pub fn enter(&self) {
        // SAFETY: the context is retained for the rest of the process.
        self.check("cuCtxSetCurrent", unsafe { (self.api.ctx_set)(self.context as *mut c_void) });
    }

    /// A stream that does not wait for the legacy default stream. It lives as long as the process, like every object
    /// made here except memory.
    pub fn stream(&self) -> Stream {
        let mut made = std::ptr::null_mut();
        // SAFETY: writes a handle.
        self.check("cuStreamCreate", unsafe { (self.api.stream_create)(&raw mut made, NON_BLOCKING) });
        Stream(made as usize)
    }

    /// An event without timing.
    pub fn event(&self) -> Event {
        self.new_event(DISABLE_TIMING)
    }

    /// An event whose waiters sleep instead of spinning.
    pub fn blocking_event(&self) -> Event {
        self.new_event(DISABLE_TIMING | BLOCKING_SYNC)
    }

    fn new_event(&self, flags: c_uint) -> Event {
        let mut made = std::ptr::null_mut();
        // SAFETY: writes a handle.
        self.check("cuEventCreate", unsafe { (self.api.event_create)(&raw mut made, flags) });
        Event(made as usize)
    }

    #[inline(always)]
    pub fn record(&self, event: Event, stream: Stream) {
        // SAFETY: both handles were made here and are never destroyed.
        let code = unsafe { (self.api.event_record)(event.0 as *mut c_void, stream.0 as *mut c_void) };
        self.check("cuEventRecord", code);
    }

    /// Whether the work that the event covers is complete.
    #[inline(always)]
    pub fn is_done(&self, event: Event) -> bool {
        // SAFETY: the handle was made here and is never destroyed.
        match unsafe { (self.api.event_query)(event.0 as *mut c_void) } {
            0 => true,
            NOT_READY => false,
            code => self.failed("cuEventQuery", code),
        }
    }

    /// Waits for an event in the driver.
    pub fn wait(&self, event: Event) {
        // SAFETY: the handle was made here and is never destroyed.
        let code = unsafe { (self.api.event_synchronize)(event.0 as *mut c_void) };
        self.check("cuEventSynchronize", code);
    }

    /// # Safety
    /// `src` is valid until the copy is complete, and `dst` is device memory of at least that many bytes.
    #[inline(always)]
    pub unsafe fn upload(&self, dst: Address, src: *const u8, len: usize, stream: Stream) {
        // SAFETY: the caller's word.
        let code = unsafe { (self.api.upload)(dst.0, src.cast(), len, stream.0 as *mut c_void) };
        self.check("cuMemcpyHtoDAsync", code);
    }

    /// Device memory, which is never freed.
    pub fn allocate(&self, len: usize) -> Address {
        let mut made = 0;
        // SAFETY: writes an address.
        self.check("cuMemAlloc", unsafe { (self.api.allocate)(&raw mut made, len) });
        Address(made)
    }

    /// Pinned memory that the driver allocates.
    pub fn host_alloc(&self, len: usize) -> *mut u8 {
        let mut made = std::ptr::null_mut();
        // SAFETY: writes an address.
        self.check("cuMemHostAlloc", unsafe { (self.api.host_alloc)(&raw mut made, len, PORTABLE) });
        made.cast()
    }

    /// # Safety
    /// The address is from [`host_alloc`](Self::host_alloc), is freed once, and is not used afterwards.
    pub unsafe fn host_free(&self, start: *mut u8) {
        // SAFETY: the caller's word.
        self.check("cuMemFreeHost", unsafe { (self.api.host_free)(start.cast()) });
    }

    /// The call by which servers ask for free memory. It is short, and waits while another call keeps the driver busy.
    pub fn memory_info(&self) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        self.check("cuMemGetInfo", unsafe { (self.api.memory_info)(&raw mut free, &raw mut total) });
    }

    /// The kernel that spins.
    pub fn spin_kernel(&self) -> Kernel {
        let (mut module, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: writes a handle; the text ends with zero.
        self.check("cuModuleLoadData", unsafe {
            (self.api.module_load)(&raw mut module, SPIN.as_ptr().cast())
        });
        // SAFETY: as above.
        let code = unsafe { (self.api.module_function)(&raw mut kernel, module, c"spin".as_ptr()) };
        self.check("cuModuleGetFunction", code);
        Kernel(kernel as usize)
    }

    /// Launches the kernel that spins: `blocks` of 128 threads, which all fit on the device at once.
    pub fn spin(&self, kernel: Kernel, blocks: u32, nanos: u64, stream: Stream) {
        let mut limit = nanos;
        let mut parameters = [(&raw mut limit).cast::<c_void>()];
        // SAFETY: the kernel takes one number of 64 bits, which is read before the call returns.
        let code = unsafe {
            (self.api.launch)(
                kernel.0 as *mut c_void,
                blocks,
                1,
                1,
                128,
                1,
                1,
                0,
                stream.0 as *mut c_void,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", code);
    }
}

/// Mapped host memory, every page of it touched.
pub struct Mapped {
    pub start: NonNull<u8>,
    pub len: usize,
}

// SAFETY: owned memory.
unsafe impl Send for Mapped {}
// SAFETY: as above; each write to it has its own note on why no other access is concurrent.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub fn new(len: usize) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert!(start != libc::MAP_FAILED, "mmap of {len} bytes: {}", std::io::Error::last_os_error());
        let start = NonNull::new(start.cast::<u8>()).expect("not at address 0");
        for page in (0..len).step_by(4096) {
            // SAFETY: within the mapping.
            unsafe { start.add(page).write_volatile(page as u8) };
        }
        Self { start, len }
    }

    /// # Safety
    /// `offset` lies within the mapping.
    pub unsafe fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: the caller's word.
        unsafe { self.start.add(offset).as_ptr() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`, unmapped once.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Mapped memory that is registered with the driver.
pub struct Pinned {
    pub memory: Mapped,
    driver: &'static Driver,
}

impl Pinned {
    pub fn new(driver: &'static Driver, len: usize) -> Self {
        let memory = Mapped::new(len.next_multiple_of(4096));
        // SAFETY: mapped until it is unregistered.
        let code = unsafe { (driver.api.register)(memory.start.as_ptr().cast(), memory.len, PORTABLE) };
        driver.check("cuMemHostRegister", code);
        Self { memory, driver }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered once.
        let code = unsafe { (self.driver.api.unregister)(self.memory.start.as_ptr().cast()) };
        self.driver.check("cuMemHostUnregister", code);
    }
}

/// The driver, or `None` with a message. If `PINPOOL_REQUIRE` names a GPU, a missing one ends the bench. Gates are
/// judged on a GPU only.
pub fn find() -> Option<&'static Driver> {
    let without = || Err("this build is without the feature `cuda`".to_owned());
    match if cfg!(feature = "cuda") { Driver::open() } else { without() } {
        Ok(driver) => {
            println!("{}", driver.name());
            crate::measure::judge();
            Some(driver)
        }
        Err(why) => {
            let required = std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.contains("cuda"));
            assert!(!required, "PINPOOL_REQUIRE asks for a GPU: {why}");
            println!("no GPU ({why})");
            None
        }
    }
}

/// The driver's handle of one of the crate's streams.
#[cfg(feature = "cuda")]
pub fn handle(stream: &pinpool::Stream) -> Stream {
    Stream(pinpool::cuda::raw_stream(stream).expect("a stream of a GPU") as usize)
}

#[cfg(not(feature = "cuda"))]
pub fn handle(_: &pinpool::Stream) -> Stream {
    unreachable!("no driver is found without the feature `cuda`")
}
