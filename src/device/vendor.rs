//! What the drivers of CUDA and Ascend share: how a library is loaded, the words of their refusals,
//! and the names of contexts that the program made.

use std::collections::BTreeMap;
use std::ffi::{OsString, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use libloading::Library;

use super::gate;
use crate::error::{DeviceError, Error, Result};
use crate::escape::unnamed;
use crate::locks::Mutex;

/// Defines a library's entry points, all of which return `$code` where they name nothing else.
macro_rules! entry_points {
    (@ret $code:ty) => { $code };
    (@ret $code:ty, $ret:ty) => { $ret };
    ($api:ident -> $code:ty;
     required { $( $name:ident = $symbol:literal : fn($($arg:ty),* $(,)?) ;)* }
     optional { $( $(#[$doc:meta])* $later:ident = $its:literal : fn($($of:ty),* $(,)?) $(-> $ret:ty)? ;)* }) => {
        /// The entry points. The optional ones exist only in newer libraries.
        #[derive(Debug)]
        pub(crate) struct $api {
            $( pub(super) $name: $crate::device::gate::Entry<unsafe extern "C" fn($($arg),*) -> $code>, )*
            $(
                $(#[$doc])*
                pub(super) $later: Option<$crate::device::gate::Entry<
                    unsafe extern "C" fn($($of),*) -> $crate::device::vendor::entry_points!(@ret $code $(, $ret)?)
                >>,
            )*
        }

        impl $api {
            /// The calls of a library, or the name of the first that is missing.
            fn resolve(find: $crate::device::vendor::Find<'_>) -> std::result::Result<Self, &'static str> {
                use $crate::device::gate::Entry;
                // SAFETY: the symbols are the vendor's, whose signatures are those of its headers;
                // the library is never unloaded.
                unsafe {
                    Ok(Self {
                        $( $name: Entry::at(find($symbol).ok_or($symbol)?), )*
                        $( $later: find($its).map(|at| Entry::at(at)), )*
                    })
                }
            }

            /// The optional calls, and whether this library has them.
            #[allow(dead_code, reason = "only Ascend shows them")]
            pub(super) fn later(&self) -> Vec<(&'static str, bool)> {
                vec![$( ($its, self.$later.is_some()), )*]
            }
        }
    };
}
pub(super) use entry_points;

/// Looks an entry point up by its name. `None`: there is none of that name.
pub(super) type Find<'a> = &'a dyn Fn(&'static str) -> Option<*const c_void>;

/// A vendor's libraries: the one of this machine, which is loaded once, and those that tests have
/// installed, each for the devices from a number on.
pub(super) struct Libraries<A: 'static> {
    loaded: OnceLock<std::result::Result<A, String>>,
    installed: Mutex<BTreeMap<u32, &'static A>>,
}

impl<A> Libraries<A> {
    pub(super) const fn new() -> Self {
        Self { loaded: OnceLock::new(), installed: Mutex::new(BTreeMap::new()) }
    }

    /// Installs a table for the devices from `first` on.
    pub(super) fn install(&self, first: u32, table: A) {
        self.installed.lock().insert(first, Box::leak(Box::new(table)));
    }

    /// The initialised library of the device with this number. `None`: the number is not known yet,
    /// and any installed library comes before the machine's own.
    ///
    /// # Errors
    /// As for [opening a device](Error#opening-a-device), with the words of `load` or `start`.
    pub(super) fn get(
        &'static self,
        device: &str,
        ordinal: Option<u32>,
        load: fn() -> std::result::Result<A, String>,
        start: fn(&A) -> std::result::Result<(), String>,
    ) -> Result<&'static A> {
        let unavailable = |why| Error::Unavailable { device: device.into(), why };
        let installed =
            self.installed.lock().range(..=ordinal.unwrap_or(u32::MAX)).next_back().map(|(_, api)| *api);
        let api = match installed {
            Some(api) => api,
            None => self.loaded.get_or_init(load).as_ref().map_err(|why| unavailable(why.clone()))?,
        };
        // Each time: after a success it costs nothing, and what made it fail may have been mended.
        start(api).map_err(unavailable)?;
        gate::watch_exit();
        Ok(api)
    }
}

/// The library that this environment variable names.
pub(super) fn named(variable: &str) -> Option<OsString> {
    std::env::var_os(variable).filter(|path| !path.is_empty())
}

/// Loads the library that an environment variable names, else the first of the usual files that it
/// can. Looks up its entry points, and never unloads it.
///
/// # Errors
/// In words: with `remedy` where none can be loaded, with `stranger` where a call is missing.
pub(super) fn load<A>(
    variable: &str,
    usual: Vec<OsString>,
    remedy: &str,
    stranger: &str,
    resolve: fn(Find<'_>) -> std::result::Result<A, &'static str>,
) -> std::result::Result<A, String> {
    let (files, remedy) = match named(variable) {
        Some(file) => (vec![file], format!("{variable} names it; correct or unset that")),
        None => (usual, format!("{remedy}, or name the library by {variable}")),
    };
    let mut tried = Vec::new();
    for file in files {
        let shown = file.to_string_lossy();
        // SAFETY: the vendors' initialisers have no preconditions; the environment that names
        // another library is trusted (`crate::cuda` and `crate::acl` say so).
        let library = match unsafe { Library::new(&file) } {
            // Never unloaded: the library may have threads and exit handlers of its own by now.
            Ok(library) => ManuallyDrop::new(library),
            Err(error) => {
                let text = error.to_string();
                tried.push(format!("{shown} could not be loaded ({})", unnamed(&text, &shown)));
                continue;
            }
        };
        crate::foreign::debug!(target: "pinpool::device", library = &*shown, "loaded");
        // SAFETY: the symbol is only looked up; its address is as valid as the library.
        let find = |name: &str| unsafe { library.get::<*const c_void>(name.as_bytes()) }.ok().map(|at| *at);
        return resolve(&find).map_err(|symbol| format!("{shown} lacks {symbol}: {stranger}"));
    }
    Err(format!("{}: {remedy}", tried.join("; ")))
}

/// The error for a name whose ordinal is not below `count`, the number of the family's devices;
/// `none` says what to look at where there are none.
pub(super) fn no_such(family: &str, name: &str, count: u32, none: &str) -> Error {
    let why = match count {
        0 => none.into(),
        1 => format!("there is only {family}:0"),
        n => format!("there are {family}:0 to {family}:{}", n - 1),
    };
    Error::Unavailable { device: name.into(), why }
}

/// Adds a remedy to what the library says.
pub(super) fn advise(error: Error, remedy: &str) -> Error {
    match error {
        Error::Device(error) => {
            let text = format!("{}; {remedy}", error.text).into();
            Error::Device(DeviceError { text, ..error })
        }
        error => error,
    }
}

/// Waits by `wait` for a copy whose memory its caller wants back, so it repeats failed waits.
///
/// # Errors
/// The device is lost.
pub(super) fn wait_out(device: &str, wait: impl Fn() -> Result<()>) -> Result<()> {
    for attempt in 0_u64.. {
        match wait() {
            Err(error) if !error.is_device_lost() => {
                if attempt % 1024 == 0 {
                    crate::foreign::warn!(
                        target: "pinpool::device", device, %error, attempt,
                        "waiting for a blocking copy failed, trying again: its memory is the caller's"
                    );
                }
                std::thread::sleep(Duration::from_millis(attempt.min(16)));
            }
            end => return end,
        }
    }
    Ok(())
}

/// The name of the device that works in an adopted context of `device`, which no other context has
/// while this one exists. Metrics know a device by its name, so each address has a number, from 1
/// on, which a later context at the same address has too: a server that makes contexts anew does
/// not fill its metrics with names.
pub(super) fn name_on(device: &str, context: usize) -> Arc<str> {
    static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let mut seen = SEEN.lock();
    let place = seen.iter().position(|known| *known == context).unwrap_or_else(|| {
        seen.push(context);
        seen.len() - 1
    });
    format!("{device} (adopted context {})", place + 1).into()
}
