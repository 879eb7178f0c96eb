//! What every call begins and ends with; and the library itself: initialising, finalising, versions, error texts.

#![allow(non_snake_case)]

use std::cell::RefCell;
use std::ffi::{c_char, c_int};

use crate::codes::*;
use crate::world::*;

/// The longest error text, its end included.
const TEXT: usize = 512;

thread_local! {
    /// The latest error of this thread, until a call asks for it.
    static RECENT: RefCell<Option<String>> = const { RefCell::new(None) };
    /// The text handed out: always in the same place, so that a program with an old pointer reads another error's text.
    static SHOWN: RefCell<[u8; TEXT]> = const { RefCell::new([0; TEXT]) };
}

/// The calling thread has had no error.
pub fn forget() {
    RECENT.set(None);
}

/// What may be asked before `aclInit`.
fn needs_no_init(name: &str) -> bool {
    matches!(name, "aclInit" | "aclFinalize" | "aclFinalizeReference" | "aclrtGetVersion")
}

/// Counts the call, fails it if a test asked for that, and else makes it.
pub fn call(name: &'static str, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    let Some(_inside) = crate::shared::Inside::begin(name) else { return UNINITIALIZE };
    fails(name, locked(name, body))
}

/// Stores an error's text, if it is an error.
pub fn fails(name: &'static str, code: u32) -> u32 {
    if code != 0 {
        RECENT.set(Some(format!("E{code}: {name} failed on thread {}", thread())));
    }
    code
}

fn locked(name: &'static str, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    let mut guard = world();
    let Some(world) = guard.as_mut() else { return INTERNAL_ERROR };
    *world.counts.entry(name).or_default() += 1;
    world.last = name;
    if !needs_no_init(name) && name != "standin_nothing" {
        if world.ended {
            let refused: Outcome = world.violate("INIT-3", format!("{name} after the end"), UNINITIALIZE);
            return refused.err().unwrap_or_default();
        }
        if world.ready == 0 {
            world.let_pass("INIT-1", name);
        }
    }
    let mut due = None;
    for fault in world.faults.iter_mut().filter(|f| f.call == name && f.left > 0) {
        fault.left -= 1;
        if fault.left == 0 {
            due = Some((fault.code, fault.after));
        }
    }
    let Some((code, after)) = due else { return body(world).err().unwrap_or_default() };
    world.struck += 1;
    if after {
        let _ = body(world);
    }
    if is_device_lost(code) {
        let device = world.device_of(CURRENT.get()).unwrap_or(0);
        world.kill(device, code);
    }
    code
}

/// Writes a result, if there is a place for it.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn write<T>(world: &mut World, name: &str, to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return world.violate("ARG-1", name, INVALID_PARAM);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// A place for a result is there.
pub fn there<T>(world: &mut World, name: &str, to: *mut T) -> Outcome {
    if to.is_null() { world.violate("ARG-1", name, INVALID_PARAM) } else { Ok(()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclInit(path: *const c_char) -> u32 {
    call("aclInit", |w| {
        if !path.is_null() {
            // SAFETY: the caller's promise: null, or a string that ends with a zero byte.
            let path = unsafe { std::ffi::CStr::from_ptr(path) }.to_string_lossy();
            if !path.is_empty() && !std::path::Path::new(path.as_ref()).exists() {
                return Err(INVALID_FILE);
            }
        }
        w.ended = false;
        w.ready += 1;
        if w.ready == 1 {
            crate::shared::end_with_process();
        }
        if w.ready > 1 {
            w.note("REPEATED-INIT");
            return Err(REPEAT_INITIALIZE);
        }
        Ok(())
    })
}

/// Destroys everything, whatever other code uses it.
fn finalize(w: &mut World) {
    (w.ready, w.ended) = (0, true);
    let contexts: Vec<usize> = w.contexts.keys().copied().collect();
    contexts.into_iter().for_each(|context| w.end_context(context));
    for device in &mut w.devices {
        (device.sets, device.default) = (0, None);
    }
}

#[unsafe(no_mangle)]
extern "C" fn aclFinalize() -> u32 {
    call("aclFinalize", |w| {
        if w.ready == 0 {
            return w.violate("INIT-4", "aclFinalize", REPEAT_FINALIZE);
        }
        w.let_pass("INIT-2", "aclFinalize");
        finalize(w);
        Ok(())
    })
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclFinalizeReference(left: *mut u64) -> u32 {
    const NAME: &str = "aclFinalizeReference";
    call(NAME, |w| {
        if w.ready == 0 {
            return w.violate("INIT-4", NAME, REPEAT_FINALIZE);
        }
        w.ready -= 1;
        if !left.is_null() {
            // SAFETY: as above: may be null, which the documentation allows.
            unsafe { left.write(w.ready) };
        }
        if w.ready == 0 {
            finalize(w);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtGetVersion(major: *mut c_int, minor: *mut c_int, patch: *mut c_int) -> u32 {
    const NAME: &str = "aclrtGetVersion";
    let version = if cfg!(feature = "acl2022") { (1, 1, 0) } else { (1, 15, 0) };
    call(NAME, |w| {
        // SAFETY: the caller's promise.
        unsafe {
            write(w, NAME, major, version.0)?;
            write(w, NAME, minor, version.1)?;
            write(w, NAME, patch, version.2)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetSocName() -> *const c_char {
    let Some(_inside) = crate::shared::Inside::begin("aclrtGetSocName") else { return std::ptr::null() };
    static NAMED: std::sync::OnceLock<Option<std::ffi::CString>> = std::sync::OnceLock::new();
    let named =
        || std::env::var("PINPOOL_STANDIN_SOC").ok().and_then(|name| std::ffi::CString::new(name).ok());
    NAMED.get_or_init(named).as_ref().map_or(c"Ascend910B-standin".as_ptr(), |name| name.as_ptr())
}

/// The latest error of this thread, once. Null: there was none since the last call asked. An older pointer shows this
/// text.
#[unsafe(no_mangle)]
extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    let Some(_inside) = crate::shared::Inside::begin("aclGetRecentErrMsg") else { return std::ptr::null() };
    if let Some(world) = world().as_mut() {
        *world.counts.entry("aclGetRecentErrMsg").or_default() += 1;
    }
    let Some(text) = RECENT.take() else { return std::ptr::null() };
    SHOWN.with_borrow_mut(|shown| {
        let n = text.len().min(TEXT - 1);
        shown[..n].copy_from_slice(&text.as_bytes()[..n]);
        shown[n..].fill(0);
        shown.as_ptr().cast()
    })
}
