//! pinpool's two kernels: a module that has them, launches, and what they do when a stream comes to them.
//!
//! There is nothing here that could run PTX: an image is taken for pinpool's if it has the entries `pinpool_spread` and
//! `pinpool_collect`, and what those do is written down once more. The parameter is read at the launch, as a driver
//! reads it, and the tables of rows when the kernel runs. The rows are copied last first, since no program may rely on
//! their order.
//!
//! A kernel that touches memory which is not there ends its context with 700 (illegal address), as on a GPU.
//!
//! `standin_kernel_delay` makes each kernel start that many microseconds after its launch, as beside kernels that fill
//! all of a GPU: until then queries of what is behind it say "not ready", and a call that synchronises waits.

#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::time::{Duration, Instant};

use crate::calls::{call, write};
use crate::world::*;

/// The shape of each launch.
const BLOCKS: [c_uint; 3] = [16, 1, 1];
const THREADS: [c_uint; 3] = [512, 1, 1];
/// The most runs of a launch.
const RUNS: usize = 32;
/// Bytes of a row's description, to which tables are aligned.
const ROW: usize = 16;

#[derive(Default)]
pub struct Modules {
    /// The context of each.
    modules: BTreeMap<usize, usize>,
    functions: BTreeMap<usize, Function>,
    /// How long after its launch a kernel starts.
    delay: Duration,
}

#[derive(Clone, Copy)]
struct Function {
    module: usize,
    way: Way,
}

/// Where rows go: from the packed bytes to their places, or the other way.
#[derive(Clone, Copy, Debug)]
enum Way {
    Spread,
    Collect,
}

/// The parameter of both kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Runs {
    run: [Run; RUNS],
    count: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Run {
    packed: u64,
    table: u64,
    rows: u32,
}

/// A kernel that is queued.
#[derive(Clone, Debug)]
pub struct Launch {
    context: usize,
    module: usize,
    way: Way,
    runs: Vec<Run>,
    start: Instant,
}

/// A row: where it is among the packed bytes, its place, its length.
struct Row {
    packed: u64,
    place: u64,
    len: usize,
}

impl Modules {
    pub fn count(&self, is: impl Fn(usize) -> bool) -> usize {
        self.modules.values().filter(|context| is(**context)).count()
    }

    pub fn forget(&mut self, context: usize) {
        self.modules.retain(|_, of| *of != context);
        self.functions.retain(|_, f| self.modules.contains_key(&f.module));
    }
}

impl World {
    /// The rows of a run as its table has them now. `None`: the table is not in device memory of that context.
    fn rows(&self, context: usize, run: &Run) -> Option<Vec<Row>> {
        let len = run.rows as usize * ROW;
        self.is_memory(context, run.table, len).then_some(())?;
        let table = self.bytes(Place::Device(run.table), len);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let row = |text: &[u8]| Row {
            place: word(&text[..8]),
            packed: run.packed.wrapping_add(word(&text[8..12])),
            len: word(&text[12..]) as usize,
        };
        Some(table.chunks_exact(ROW).map(row).collect())
    }

    /// Whether these bytes are in one allocation of that context.
    fn is_memory(&self, context: usize, at: u64, len: usize) -> bool {
        let Some((start, block)) = self.blocks.range(..=at).next_back() else { return false };
        block.context == context
            && ((at - start) as usize).checked_add(len).is_some_and(|end| end <= block.len)
    }

    /// Whether a queued kernel uses such memory, as far as its tables are there already.
    pub fn kernel_uses(&self, launch: &Launch, uses: impl Fn(&Place, usize) -> bool) -> bool {
        launch.runs.iter().any(|run| {
            uses(&Place::Device(run.table), run.rows as usize * ROW)
                || self.rows(launch.context, run).is_some_and(|rows| {
                    let used = |at: u64, len| uses(&Place::Device(at), len);
                    rows.iter().any(|row| used(row.place, row.len) || used(row.packed, row.len))
                })
        })
    }

    /// Whether a kernel among the work of a stream up to a place does not start yet.
    pub fn is_slow(&self, handle: usize, upto: u64) -> bool {
        let Some(stream) = self.streams.get(&handle).filter(|_| !self.modules.delay.is_zero()) else {
            return false;
        };
        let now = Instant::now();
        let queued = stream.queue.iter().take(upto.saturating_sub(stream.done) as usize);
        queued.into_iter().any(|op| match op {
            Op::Kernel(launch) => launch.start > now,
            Op::Wait { stream, upto } => self.is_slow(*stream, *upto),
            _ => false,
        })
    }

    /// A stream has come to a kernel.
    pub fn run_kernel(&mut self, launch: &Launch) {
        if !self.modules.delay.is_zero() {
            std::thread::sleep(launch.start.saturating_duration_since(Instant::now()));
        }
        let fault = |w: &mut Self, code, text: String| {
            let _: Outcome = w.violate("KER-5", text, code);
            w.kill(launch.context, code);
        };
        let (mut copies, mut read) = (Vec::new(), Vec::new());
        for run in &launch.runs {
            if run.table % ROW as u64 != 0 {
                return fault(self, MISALIGNED_ADDRESS, format!("a table at {:#x}", run.table));
            }
            let Some(rows) = self.rows(launch.context, run) else {
                return fault(
                    self,
                    ILLEGAL_ADDRESS,
                    format!("a table of {} rows at {:#x}", run.rows, run.table),
                );
            };
            read.push((run.table, run.rows as usize * ROW));
            for Row { packed, place, len } in rows.into_iter().filter(|row| row.len > 0) {
                for at in [packed, place] {
                    if !self.is_memory(launch.context, at, len) {
                        return fault(self, ILLEGAL_ADDRESS, format!("{len} bytes at {at:#x}"));
                    }
                    self.check_born(at, len);
                }
                copies.push(match launch.way {
                    Way::Spread => (packed, place, len),
                    Way::Collect => (place, packed, len),
                });
            }
        }
        let mut written: Vec<(u64, usize)> = copies.iter().map(|(_, dst, len)| (*dst, *len)).collect();
        written.sort_unstable();
        read.extend(copies.iter().map(|(src, _, len)| (*src, *len)));
        let twice = written.windows(2).find(|w| w[0].0 + w[0].1 as u64 > w[1].0).map(|w| w[1]);
        // Apart from each other, those that are written end in the order in which they begin.
        let meets = |(at, len): &(u64, usize)| {
            let before = written.partition_point(|(start, _)| *start < at + *len as u64);
            before > 0 && written[before - 1].0 + written[before - 1].1 as u64 > *at
        };
        if let Some((at, len)) = twice.or_else(|| read.into_iter().find(meets)) {
            let text = format!("{len} bytes at {at:#x} meet what another row writes");
            let _: Outcome = self.violate("KER-6", text, 0);
        }
        for (src, dst, len) in copies.into_iter().rev() {
            let bytes = self.bytes(Place::Device(src), len);
            self.write(Place::Device(dst), &bytes);
        }
    }

    fn function(&mut self, name: &str, handle: usize) -> Outcome<Function> {
        let context = self.current(name)?;
        let known = self.modules.functions.get(&handle).copied();
        match known.filter(|f| self.modules.modules.get(&f.module) == Some(&context)) {
            Some(function) => Ok(function),
            None => self.violate("KER-2", format!("{name}: no function {handle:#x}"), INVALID_HANDLE),
        }
    }

    fn module(&mut self, name: &str, handle: usize) -> Outcome<usize> {
        let context = self.current(name)?;
        if self.modules.modules.get(&handle) == Some(&context) {
            return Ok(handle);
        }
        self.violate("KER-2", format!("{name}: no module {handle:#x}"), INVALID_HANDLE)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> u32 {
    const NAME: &str = "cuModuleLoadData";
    call(NAME, |w| {
        let context = w.current(NAME)?;
        w.unsafe_call(NAME)?;
        if image.is_null() {
            return w.violate("ARG-1", NAME, INVALID_VALUE);
        }
        // SAFETY: the caller's promise: PTX is a string that ends with a zero byte.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        let has = |name: &str| text.contains(&format!(".visible .entry {name}("));
        if !has("pinpool_spread") || !has("pinpool_collect") {
            return w.violate("KER-1", "an image without the two kernels", INVALID_PTX);
        }
        let made = w.fresh();
        w.modules.modules.insert(made, context);
        // SAFETY: the caller's promise, here and in all calls below: what is written to is valid.
        unsafe { write(w, NAME, module, made as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: *mut c_void) -> u32 {
    const NAME: &str = "cuModuleUnload";
    call(NAME, |w| {
        w.unsafe_call(NAME)?;
        let handle = w.module(NAME, module as usize)?;
        let last = |s: &Stream| {
            let of = |op: &Op| matches!(op, Op::Kernel(launch) if launch.module == handle);
            s.queue.iter().rposition(of).map(|at| s.done + at as u64 + 1)
        };
        let queued: Vec<_> = w.streams.iter().filter_map(|(h, s)| last(s).map(|upto| (*h, upto))).collect();
        for (stream, upto) in queued {
            let text = format!("{handle:#x} is used by a queued kernel");
            let _: Outcome = w.violate("KER-8", text, 0);
            w.run(stream, upto);
        }
        w.modules.modules.remove(&handle);
        w.modules.functions.retain(|_, f| f.module != handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> u32 {
    const NAME: &str = "cuModuleGetFunction";
    call(NAME, |w| {
        // It may load the function.
        w.unsafe_call(NAME)?;
        let module = w.module(NAME, module as usize)?;
        if name.is_null() {
            return w.violate("ARG-1", NAME, INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        let way = match unsafe { CStr::from_ptr(name) }.to_bytes() {
            b"pinpool_spread" => Way::Spread,
            b"pinpool_collect" => Way::Collect,
            other => {
                let text = format!("no function {}", String::from_utf8_lossy(other));
                return w.violate("KER-3", text, NOT_FOUND);
            }
        };
        let made = w.fresh();
        w.modules.functions.insert(made, Function { module, way });
        // SAFETY: as above.
        unsafe { write(w, NAME, function, made as *mut c_void) }
    })
}

/// Of CUDA 12.4.
#[cfg(not(any(feature = "cuda11", feature = "cuda12")))]
#[unsafe(no_mangle)]
extern "C" fn cuFuncLoad(function: *mut c_void) -> u32 {
    const NAME: &str = "cuFuncLoad";
    call(NAME, |w| {
        w.unsafe_call(NAME)?;
        w.function(NAME, function as usize).map(drop)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    blocks_x: c_uint,
    blocks_y: c_uint,
    blocks_z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    const NAME: &str = "cuLaunchKernel";
    call(NAME, |w| {
        let function = w.function(NAME, function as usize)?;
        let captured = w.stream(NAME, stream as usize)?.capture.is_some();
        let (blocks, threads) = ([blocks_x, blocks_y, blocks_z], [threads_x, threads_y, threads_z]);
        if (blocks, threads, shared) != (BLOCKS, THREADS, 0) || !extra.is_null() {
            let text = format!("{NAME}: {blocks:?} blocks of {threads:?} threads, {shared} bytes shared");
            return w.violate("KER-4", text, INVALID_VALUE);
        }
        if parameters.is_null() {
            return w.violate("ARG-1", NAME, INVALID_VALUE);
        }
        // SAFETY: the caller's promise: both kernels have one parameter, of this type.
        let runs = unsafe { parameters.read().cast::<Runs>().read() };
        let count = runs.count as usize;
        if !(1..=RUNS).contains(&count) {
            let _: Outcome = w.violate("KER-5", format!("{NAME}: {count} runs"), 0);
        }
        if captured {
            let _: Outcome = w.violate("KER-7", format!("{NAME} on {stream:?}"), 0);
        }
        let launch = Launch {
            context: w.current(NAME)?,
            module: function.module,
            way: function.way,
            runs: runs.run[..count.min(RUNS)].to_vec(),
            start: Instant::now() + w.modules.delay,
        };
        w.submit(NAME, stream as usize, Op::Kernel(launch)).map(drop)
    })
}

/// Kernels start that many microseconds after their launch. 0: none waits any more.
#[unsafe(no_mangle)]
extern "C" fn standin_kernel_delay(microseconds: u64) {
    if let Some(world) = world().as_mut() {
        world.modules.delay = Duration::from_micros(microseconds);
    }
}
