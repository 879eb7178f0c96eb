//! Building the stand-in libascendcl of `tests/doubles/acl`, whose page has its rules, and calling it without pinpool
//! in between.
//!
//! A loaded library is a [`StandIn`] like the one that stands in for libcuda: the controls of tests have the same
//! names. [`Acl`] has that one library to itself, one test at a time.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::{Double, HANG, Report, StandIn, again_with, build};
use crate::support::skip;

/// The variable that pinpool reads.
pub const PATH: &str = "PINPOOL_LIBASCENDCL";
/// A file that the report is written to when the process exits.
pub const REPORT: &str = "PINPOOL_STANDIN_REPORT";

const ACL: Double =
    Double { source: "tests/doubles/acl", target: "doubles-acl", library: "libascendcl_standin.so" };

/// The library, built on first use. `None`: there is no cargo to build it with, or no source.
pub fn library() -> Option<PathBuf> {
    build(&ACL, "")
}

/// The library as an older one, which lacks some calls: by the name of the double's feature.
pub fn older(feature: &str) -> Option<PathBuf> {
    build(&ACL, feature)
}

/// The stand-in that the environment names, or the one that is built.
pub fn named_or_built() -> Option<PathBuf> {
    let named = std::env::var_os(PATH).filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(library)
}

/// Whether this process is the child that [`again`] started, or its environment names a library to load.
pub fn is_set() -> bool {
    std::env::var_os(PATH).is_some_and(|path| !path.is_empty())
}

/// Runs this very test again in a process of its own that loads the stand-in, with more in its environment.
pub fn again(test: &str, environment: &[(&str, &str)]) {
    match named_or_built() {
        Some(library) => again_with(test, PATH, &library, environment),
        None => skip!("there is no cargo to build the stand-in libascendcl with"),
    }
}

/// The stand-in that this process uses. `None`: the library that was named is something else, the vendor's.
pub fn of_this_process() -> Option<StandIn> {
    StandIn::load(Path::new(&std::env::var_os(PATH)?))
}

/// The report of a process that had [`REPORT`] set and has ended. `None`: there is none.
pub fn report_of(path: &Path) -> Option<Report> {
    std::fs::read_to_string(path).ok().map(|text| Report::parse(&text))
}

/// Calls an entry point whose arguments are all numbers of the size of a pointer, or are passed like one.
macro_rules! acl {
    ($acl:expr, $name:literal $(, $argument:expr)*) => {{
        // SAFETY: on the machines that pinpool supports integer and pointer arguments are passed alike, each in a
        // register of its own, and what the tests point at is valid.
        unsafe {
            let function = $acl.stand_in.get::<unsafe extern "C" fn($($crate::support::doubles::ascendcl::word!($argument)),*) -> u32>($name);
            function($($argument as usize),*)
        }
    }};
}

/// A word for each argument.
macro_rules! word {
    ($argument:expr) => {
        usize
    };
}

/// The same for a call that writes one word to its first argument and must succeed.
macro_rules! made {
    ($acl:expr, $name:literal $(, $argument:expr)*) => {{
        let mut made = 0_usize;
        assert_eq!($crate::support::doubles::ascendcl::acl!($acl, $name, &raw mut made $(, $argument)*), 0, $name);
        made
    }};
}

/// A call that must give this code.
macro_rules! says {
    ($acl:expr, $code:expr, $name:literal $(, $argument:expr)*) => {
        assert_eq!($crate::support::doubles::ascendcl::acl!($acl, $name $(, $argument)*), $code, $name)
    };
}

#[allow(unused_imports, reason = "each test uses a part of it")]
pub(crate) use {acl, made, says, word};

/// The stand-in as if just loaded, for one test at a time.
pub struct Acl {
    pub stand_in: StandIn,
    _alone: MutexGuard<'static, ()>,
}

pub const HOST_TO_DEVICE: usize = 1;
pub const DEVICE_TO_HOST: usize = 2;
/// What events of a pool are made with: `ACL_EVENT_CAPTURE_STREAM_PROGRESS`.
pub const PROGRESS: usize = 2;
/// `ACL_EVENT_SYNC`.
pub const SYNC: usize = 1;

static ALONE: Mutex<()> = Mutex::new(());

impl Acl {
    /// Not even initialised. `None`: nothing to build it with.
    pub fn bare() -> Option<Self> {
        let Some(library) = named_or_built() else {
            skip!("there is no cargo to build the stand-in libascendcl with; {PATH} can name a built one");
            return None;
        };
        let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(stand_in) = StandIn::load(&library) else {
            skip!("{} is no stand-in", library.display());
            return None;
        };
        stand_in.reset();
        Some(Self { stand_in, _alone: alone })
    }

    /// Initialised, and device 0 set.
    pub fn ready() -> Option<Self> {
        let acl = Self::bare()?;
        acl.start();
        Some(acl)
    }

    /// The same on the device itself: RC mode.
    pub fn on_device() -> Option<Self> {
        let acl = Self::bare()?;
        acl.set_on_device(true);
        acl.start();
        Some(acl)
    }

    fn start(&self) {
        says!(self, 0, "aclInit", 0);
        says!(self, 0, "aclrtSetDevice", 0);
    }

    pub fn set_on_device(&self, on_device: bool) {
        // SAFETY: the double's `control.rs` has the signatures, here and below.
        unsafe { self.stand_in.get::<extern "C" fn(bool)>("standin_on_device")(on_device) }
    }

    /// Whether every copy is of a whole segment.
    pub fn copy_whole_segments(&self, whole: bool) {
        // SAFETY: as above.
        unsafe { self.stand_in.get::<extern "C" fn(bool)>("standin_segments")(whole) }
    }

    /// Events and streams of each device.
    pub fn limit(&self, events: usize, streams: usize) {
        // SAFETY: as above.
        unsafe { self.stand_in.get::<extern "C" fn(usize, usize)>("standin_limits")(events, streams) }
    }

    /// Bytes of one block of host memory, and of all.
    pub fn limit_host(&self, extent: usize, all: usize) {
        // SAFETY: as above.
        unsafe { self.stand_in.get::<extern "C" fn(usize, usize)>("standin_host_limits")(extent, all) }
    }

    /// Whether memory can be registered, and allocated with `VA_FLAG`.
    pub fn enable(&self, register: bool, va: bool) {
        // SAFETY: as above.
        unsafe { self.stand_in.get::<extern "C" fn(bool, bool)>("standin_abilities")(register, va) }
    }

    pub fn current(&self) -> usize {
        made!(self, "aclrtGetCurrentContext")
    }

    pub fn stream(&self) -> usize {
        made!(self, "aclrtCreateStream")
    }

    pub fn event(&self) -> usize {
        made!(self, "aclrtCreateEventExWithFlag", PROGRESS | SYNC)
    }

    pub fn memory(&self, len: usize) -> usize {
        made!(self, "aclrtMalloc", len, 0)
    }

    /// Page-locked memory of the library's.
    pub fn host(&self, len: usize) -> Locked {
        Locked { at: made!(self, "aclrtMallocHost", len), len }
    }

    pub fn upload(&self, to: usize, from: usize, len: usize, stream: usize) -> u32 {
        acl!(self, "aclrtMemcpyAsync", to, len, from, len, HOST_TO_DEVICE, stream)
    }

    pub fn download(&self, to: usize, from: usize, len: usize, stream: usize) -> u32 {
        acl!(self, "aclrtMemcpyAsync", to, len, from, len, DEVICE_TO_HOST, stream)
    }

    /// The attributes of device memory, read at once.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        says!(self, 0, "aclrtMemcpy", bytes.as_mut_ptr(), len, at, len, DEVICE_TO_HOST);
        bytes
    }

    /// Whether an event is complete, as `aclrtQueryEventStatus` says it.
    pub fn is_complete(&self, event: usize) -> bool {
        let mut status = 7_u32;
        says!(self, 0, "aclrtQueryEventStatus", event, &raw mut status);
        assert!(status < 2, "a status of {status}");
        status == 1
    }

    /// Polls until it is complete, and returns how often it was not.
    pub fn wait(&self, event: usize) -> usize {
        let since = Instant::now();
        let mut asked = 0;
        while !self.is_complete(event) {
            assert!(since.elapsed() < HANG, "never complete");
            asked += 1;
        }
        asked
    }

    /// The latest error's text, if there is one.
    pub fn message(&self) -> Option<String> {
        // SAFETY: acl.h has the signature; the result is null or a string until the next call.
        unsafe {
            let text =
                self.stand_in.get::<extern "C" fn() -> *const std::ffi::c_char>("aclGetRecentErrMsg")();
            (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    }

    /// Checks that exactly these rules were broken, in this order.
    pub fn broken(&self, ids: &[&str]) {
        let found = self.stand_in.report().violations;
        let ids_found: Vec<&str> = found.iter().filter_map(|v| v.split(' ').next()).collect();
        assert_eq!(ids_found, ids, "{found:#?}");
    }
}

/// A block of page-locked memory, which its test frees or leaves.
pub struct Locked {
    pub at: usize,
    len: usize,
}

impl std::ops::Deref for Locked {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: as long as that until it is freed, and filled by the stand-in.
        unsafe { std::slice::from_raw_parts(self.at as *const u8, self.len) }
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at as *mut u8, self.len) }
    }
}
