//! What every call begins and ends with; and the library itself: initialising, finalising, error texts.

use std::cell::RefCell;
use std::ffi::c_char;

use super::codes::*;
use super::world::*;
use crate::common::entries;

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
    matches!(name, "aclInit" | "aclFinalize")
}

/// Counts a call in the world with that number, fails it if a test asked for that, and else makes it.
pub fn call(name: &'static str, number: usize, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    let Some(_inside) = crate::end::Inside::begin(name) else { return UNINITIALIZE };
    fails(name, made(name, &mut world(number), body))
}

/// Stores an error's text, if it is an error.
pub fn fails(name: &'static str, code: u32) -> u32 {
    if code != 0 {
        let text = format!("E{code}: {name} failed on thread {}", thread());
        // A thread that ends has no place for it any more.
        let _ = RECENT.try_with(|recent| recent.replace(Some(text)));
    }
    code
}

fn made(name: &'static str, world: &mut World, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    world.count(name);
    world.last = name;
    if !needs_no_init(name) {
        if world.ended {
            world.let_pass("INIT-3", "after the end");
            return UNINITIALIZE;
        }
        if !world.ready {
            world.let_pass("INIT-1", "before aclInit");
        }
    }
    let Some((code, after)) = world.strike(name) else { return body(world).err().unwrap_or_default() };
    if after {
        let _ = body(world);
    }
    if is_device_lost(code) {
        let device = world.device_of(CURRENT.get()).unwrap_or(0);
        world.kill(device, code);
    }
    code
}

/// Writes a result: a handle, an address, a number.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn gives<T>(w: &mut World, to: *mut T, body: impl FnOnce(&mut World) -> Outcome<T>) -> Outcome {
    there(w, to as usize)?;
    let result = body(w)?;
    // SAFETY: the caller's promise, and it is not null.
    unsafe { to.write(result) };
    Ok(())
}

/// What is pointed at is there.
pub fn there(world: &mut World, at: usize) -> Outcome {
    if at == 0 { world.violate("ARG-1", "null", INVALID_PARAM) } else { Ok(()) }
}

entries! {
    acl;

    fn aclInit(path: *const c_char) in here(), |w, name| {
        if !path.is_null() {
            // SAFETY: the caller's promise: null, or a string that ends with a zero byte.
            let path = unsafe { std::ffi::CStr::from_ptr(path) }.to_string_lossy();
            if !path.is_empty() && !std::path::Path::new(path.as_ref()).exists() {
                return Err(INVALID_FILE);
            }
        }
        w.ended = false;
        if std::mem::replace(&mut w.ready, true) {
            return Err(REPEAT_INITIALIZE);
        }
        crate::end::end_with_process();
        Ok(())
    }

    /// Destroys everything, whatever other code uses it.
    fn aclFinalize() in here(), |w, name| {
        if !w.ready {
            return w.violate("INIT-4", "not initialised", REPEAT_FINALIZE);
        }
        w.let_pass("INIT-2", "for all users");
        (w.ready, w.ended) = (false, true);
        let contexts: Vec<usize> = w.contexts.keys().copied().collect();
        contexts.into_iter().for_each(|context| w.end_context(context));
        for device in &mut w.devices {
            (device.sets, device.default) = (0, None);
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    let Some(_inside) = crate::end::Inside::begin("aclrtGetSocName") else { return std::ptr::null() };
    c"Ascend910B-standin".as_ptr()
}

/// The latest error of this thread, once. Null: there was none since the last call asked. An older pointer shows this
/// text.
#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    let Some(_inside) = crate::end::Inside::begin("aclGetRecentErrMsg") else { return std::ptr::null() };
    world(here()).count("aclGetRecentErrMsg");
    let Some(text) = RECENT.take() else { return std::ptr::null() };
    SHOWN.with_borrow_mut(|shown| {
        let n = text.len().min(TEXT - 1);
        shown[..n].copy_from_slice(&text.as_bytes()[..n]);
        shown[n..].fill(0);
        shown.as_ptr().cast()
    })
}
