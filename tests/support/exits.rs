//! Programs that end in the middle of their work, in each way in which a program can end.
//!
//! A test starts itself again and again as a small server ([`Busy`]): pool, streams and copier, all at
//! work on threads of its own, a pool that grows, and large device buffers that are dropped right before the end, which a
//! thread of the crate's frees later. Each such process must end with its own status. A stand-in writes a report when the process
//! exits, and must have seen no call after the exit began, nor one under way.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(unsafe_code, reason = "signals, and a library that is loaded and unloaded")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use libloading::Library;
use pinpool::{Device, DeviceSlice, ErrorClass, Pool, Stream, copier::Copier};

use super::{doubles, process};

/// What a child is to do: the way to end, and the number of the run.
const EXIT: &str = "PINPOOL_TEST_EXIT";
/// A built `examples/plugin.rs`, where cargo has built none.
const PLUGIN: &str = "PINPOOL_TEST_PLUGIN";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// `main` returns. The pool was shut down before, and everything dropped.
    Return,
    /// `main` returns while everything is at work.
    ReturnBusy,
    /// `exit` on the thread of the test, and on another thread.
    Exit,
    ExitElsewhere,
    /// A panic.
    Panic,
    /// SIGTERM, with a handler that exits.
    Signal,
    /// A library that has the pool in it is unloaded, and then `main` returns.
    Unload,
    /// The child of a fork exits, and then its parent.
    Fork,
}

use Way::*;
const WAYS: [Way; 8] = [Return, ReturnBusy, Exit, ExitElsewhere, Panic, Signal, Unload, Fork];

impl Way {
    /// The program's own exit status.
    fn status(self) -> i32 {
        match self {
            Self::Return | Self::ReturnBusy | Self::Unload => 0,
            Self::Exit | Self::ExitElsewhere | Self::Signal | Self::Fork => 7,
            // As the test harness reports it.
            Self::Panic => 101,
        }
    }
}

/// Starts the test `test` as often as is asked for in each of the ways, with more in its
/// environment, and checks how the processes end. `device` is opened there.
pub fn all(test: &str, device: &str, environment: &[(&str, &str)]) {
    if let Ok(todo) = std::env::var(EXIT) {
        let (way, number) = todo.split_once(':').expect("a way and a number");
        let way = WAYS.into_iter().find(|known| format!("{known:?}") == way).expect("a way");
        return run(way, number.parse().expect("a number"), device);
    }
    let times = super::variable("PINPOOL_EXITS", 4);
    let mut wrong = Vec::new();
    for way in WAYS {
        let plugin = if way == Way::Unload { plugin() } else { Some(PathBuf::new()) };
        let Some(plugin) = plugin else {
            crate::support::skip!("examples/plugin.rs is not built, and {PLUGIN} names none");
            continue;
        };
        for number in 0..times {
            let report =
                std::env::temp_dir().join(format!("pinpool-exit-{}-{test}-{way:?}", std::process::id()));
            let _ = std::fs::remove_file(&report);
            let mut command = process::command(test);
            command.env(EXIT, format!("{way:?}:{number}")).env(PLUGIN, &plugin);
            command.env(doubles::npu::REPORT, &report).envs(environment.iter().copied());
            let child = doubles::ended(&mut command, Duration::from_secs(120));
            let seen = doubles::npu::report_of(&report).unwrap_or_default();
            let _ = std::fs::remove_file(&report);
            let late = seen.violations.iter().filter(|text| text.starts_with("END-")).count();
            let meant = child.stdout.contains("ending now");
            let ended = child.status.and_then(|status| status.code()) == Some(way.status());
            // Only the error of a call that came after the exit began.
            let errors = child.stdout.lines().filter_map(|line| line.strip_prefix("late: "));
            let refused = errors.clone().all(|error| error.starts_with("DriverShutdown: "));
            if !ended || !meant || late > 0 || !refused {
                let errors: Vec<_> = errors.collect();
                wrong.push(format!(
                    "{way:?} {number}: the child {}, {late} calls after the exit began, late errors {errors:?}: {}",
                    child.how(),
                    child.last_words()
                ));
            }
        }
        println!("{test}: {way:?}: {times} processes");
    }
    let some = &wrong[..wrong.len().min(5)];
    assert!(some.is_empty(), "{test}: {} processes: {}", wrong.len(), some.join("\n"));
}

/// `examples/plugin.rs`, a shared library, which is built with all tests.
fn plugin() -> Option<PathBuf> {
    let named = std::env::var_os(PLUGIN).filter(|path| !path.is_empty()).map(PathBuf::from);
    // target/PROFILE/deps/this
    let here = std::env::current_exe().ok()?;
    let built = || Some(here.parent()?.parent()?.join("examples/libplugin.so")).filter(|path| path.exists());
    named.or_else(built)
}

struct Busy {
    device: Device,
    pool: Pool,
    stream: Stream,
    bulk: Copier,
    memory: DeviceSlice,
}

const LEN: usize = 64 << 10;

impl Busy {
    fn begin(device: &str) -> Self {
        let device = Device::open(device).expect("the device can be opened");
        let pool = Pool::builder(&device).capacity(16 << 20).build().expect("a pool");
        let stream = device.stream().expect("a stream");
        let bulk = Copier::builder(&pool, &device).chunk(LEN).build().expect("a bulk");
        let memory = device.alloc(1 << 20).expect("device memory");
        Self { device, pool, stream, bulk, memory }
    }

    /// Threads of the program that go on until a call fails, and say why it did.
    fn work(&self) {
        let (pool, memory) = (&self.pool, &self.memory);
        for stream in [self.stream.clone(), self.device.stream().expect("a stream")] {
            let (pool, memory) = (pool.clone(), memory.clone());
            on_thread(move || {
                let mut buf = pool.checkout(LEN)?;
                buf.extend_from_slice(&[1; 1000]);
                let sent = stream.upload(buf, memory.slice(..1000)?).map_err(|refused| refused.error)?;
                drop(sent.wait()?);
                Ok(())
            });
        }
        let (bulk, memory) = (self.bulk.clone(), memory.clone());
        on_thread(move || bulk.upload_slices(&[(&[2; 500], memory.slice(2000..2500)?)]));
        let (bulk, memory) = (self.bulk.clone(), self.memory.clone());
        on_thread(move || bulk.upload_slice(&[3; 4 * LEN], memory.slice(LEN..5 * LEN)?));
        // A pool that grows, as far as the system lets it, and a thread that waits for more.
        let growing =
            Pool::builder(&self.device).capacity(256 << 20).initial(0).region(64 << 20).extent(16 << 20);
        std::thread::spawn(move || {
            let Ok(pool) = growing.build() else { return };
            let more = || pool.checkout_timeout(2 << 20, Duration::from_secs(60)).ok();
            drop(std::iter::from_fn(more).collect::<Vec<_>>());
        });
    }

    /// Large device buffers that are dropped right before the end: a thread of the crate's frees them.
    fn drop_large(&self) {
        let large: Vec<_> = (0..16).map(|_| self.device.alloc(1 << 20).expect("device memory")).collect();
        drop(large);
    }
}

fn on_thread(mut step: impl FnMut() -> pinpool::Result<()> + Send + 'static) {
    std::thread::spawn(move || {
        loop {
            if let Err(error) = step() {
                // Not by way of `print`, whose lock the end of the process takes.
                let class: ErrorClass = error.class();
                let text = format!("late: {class:?}: {error}\n");
                // SAFETY: writes bytes that live for the call.
                unsafe { libc::write(1, text.as_ptr().cast(), text.len()) };
                return;
            }
        }
    });
}

extern "C" fn exits(_signal: libc::c_int) {
    // SAFETY: raised on a thread that holds no lock.
    unsafe { libc::exit(Way::Signal.status()) };
}

fn run(way: Way, number: u64, device: &str) {
    // Not at the same place each time.
    let moment = Duration::from_micros(500 + number % 20 * number % 20 * 40);
    if way == Way::Unload {
        return unload(device, moment);
    }
    let busy = Busy::begin(device);
    if way == Way::Return {
        let mut buf = busy.pool.checkout(LEN).expect("a buffer");
        buf.extend_from_slice(&[4; 1000]);
        drop(busy.bulk.upload_slice(&[3; 4 * LEN], busy.memory.slice(LEN..5 * LEN).expect("a range")));
        let sent = busy.stream.upload(buf, busy.memory.slice(..1000).expect("a range")).expect("an upload");
        drop(sent);
        busy.drop_large();
        let _ = busy.pool.shutdown(Duration::from_secs(5));
        println!("ending now");
        return;
    }
    busy.work();
    std::thread::sleep(moment);
    busy.drop_large();
    println!("ending now");
    match way {
        Way::Exit => std::process::exit(way.status()),
        Way::ExitElsewhere => {
            let other = std::thread::spawn(move || std::process::exit(way.status()));
            let _ = other.join();
        }
        Way::Panic => panic!("as it was meant to"),
        Way::Signal => {
            // SAFETY: the handler makes one call.
            unsafe { libc::signal(libc::SIGTERM, exits as *const () as libc::sighandler_t) };
            // SAFETY: a signal to this thread.
            unsafe { libc::raise(libc::SIGTERM) };
        }
        Way::Fork => {
            // SAFETY: the child exits at once.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the child, by way of its exit handlers.
                unsafe { libc::exit(5) };
            }
            let mut status = 0;
            // SAFETY: waits for the child above.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 5), "the child's end");
            std::process::exit(way.status());
        }
        Way::Return | Way::ReturnBusy | Way::Unload => {}
    }
    // The threads go on, and what they use is dropped here.
}

/// Loads the plugin, has it work, and unloads it.
fn unload(device: &str, moment: Duration) {
    let path = std::env::var_os(PLUGIN).expect("a plugin");
    // SAFETY: the plugin's initialisers have no preconditions.
    let library = unsafe { Library::new(path) }.expect("the plugin can be loaded");
    let name = std::ffi::CString::new(device).expect("no zero");
    type Start = unsafe extern "C" fn(*const libc::c_char) -> libc::c_int;
    // SAFETY: `examples/plugin.rs` has the signature.
    let started = unsafe { library.get::<Start>(b"plugin_start\0").expect("a plugin")(name.as_ptr()) };
    assert_eq!(started, 0, "the plugin has started");
    std::thread::sleep(moment);
    drop(library);
    println!("ending now");
    std::thread::sleep(moment);
}
