//! pinpool's two kernels: a module that has them, launches, and what they do when a stream comes to them.
//!
//! There is nothing here that could run PTX: an image is taken for pinpool's if it has the entries `pinpool_spread` and
//! `pinpool_collect`, and what those do is written down once more. The parameter is read at the launch, as a driver
//! reads it, and the tables of rows when the kernel runs. The rows are copied last first, since no program may rely on
//! their order.
//!
//! A kernel that touches memory which is not there ends its context with 700 (illegal address), as on a GPU.

use std::ffi::{CStr, c_char, c_uint};

use super::batches::is_meeting;
use super::*;
use crate::common::{entries, fails_if};
use crate::world::{Op, Place, Stream};

const BLOCKS: [c_uint; 3] = [16, 1, 1];
const THREADS: [c_uint; 3] = [512, 1, 1];
const RUNS: usize = 32;
/// Bytes of a row's description, to which tables are aligned.
const ROW: usize = 16;

#[derive(Default)]
pub struct Modules {
    /// The context of each.
    modules: BTreeMap<usize, usize>,
    functions: BTreeMap<usize, Function>,
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
pub struct Runs {
    run: [Run; RUNS],
    count: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Run {
    packed: usize,
    table: usize,
    rows: u32,
}

#[derive(Clone, Debug)]
pub struct Launch {
    context: usize,
    module: usize,
    way: Way,
    runs: Vec<Run>,
}

/// A row: where it is among the packed bytes, its place, its length.
struct Row {
    packed: usize,
    place: usize,
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
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | usize::from(*byte));
        let row = |text: &[u8]| Row {
            place: word(&text[..8]),
            packed: run.packed.wrapping_add(word(&text[8..12])),
            len: word(&text[12..]),
        };
        Some(table.chunks_exact(ROW).map(row).collect())
    }

    /// Whether these bytes are in one allocation of that context.
    fn is_memory(&self, context: usize, at: usize, len: usize) -> bool {
        self.block(at, len).is_some_and(|(_, block, _)| block.context == context)
    }

    /// Whether a queued kernel uses such memory, by those of its tables that are there already.
    pub(crate) fn kernel_uses(&self, launch: &Launch, uses: impl Fn(Place, usize, bool) -> bool) -> bool {
        let used = |at: usize, len| uses(Place::Device(at), len, true);
        launch.runs.iter().any(|run| {
            let rows = self.rows(launch.context, run).into_iter().flatten();
            used(run.table, run.rows as usize * ROW)
                || rows.into_iter().any(|row| used(row.place, row.len) || used(row.packed, row.len))
        })
    }

    /// A stream has come to a kernel.
    pub(crate) fn run_kernel(&mut self, launch: &Launch) {
        if let Err(code) = self.try_kernel(launch) {
            self.let_pass("KER-5");
            self.kill(launch.context, code);
        }
    }

    fn try_kernel(&mut self, launch: &Launch) -> Outcome {
        let (mut copies, mut read) = (Vec::new(), Vec::new());
        for run in &launch.runs {
            fails_if(MISALIGNED_ADDRESS, run.table % ROW != 0)?;
            read.push((run.table, run.rows as usize * ROW));
            let rows = self.rows(launch.context, run).ok_or(ILLEGAL_ADDRESS)?;
            for Row { packed, place, len } in rows.into_iter().filter(|row| row.len > 0) {
                for at in [packed, place] {
                    fails_if(ILLEGAL_ADDRESS, !self.is_memory(launch.context, at, len))?;
                    self.check_born(Place::Device(at), len);
                }
                copies.push(match launch.way {
                    Way::Spread => (packed, place, len),
                    Way::Collect => (place, packed, len),
                });
            }
        }
        let written = copies.iter().map(|(_, dst, len)| (*dst, *len)).collect();
        let read = read.into_iter().chain(copies.iter().map(|(src, _, len)| (*src, *len)));
        self.let_pass_if("KER-6", is_meeting(written, read));
        for (src, dst, len) in copies.into_iter().rev() {
            let bytes = self.bytes(Place::Device(src), len);
            self.write(Place::Device(dst), &bytes);
        }
        Ok(())
    }

    fn function(&mut self, handle: usize) -> Outcome<Function> {
        let known = self.cuda.modules.functions.get(&handle).copied();
        self.module(known.map_or(0, |function| function.module))?;
        known.ok_or(INVALID_HANDLE)
    }

    /// A module of the current context.
    fn module(&mut self, handle: usize) -> Outcome {
        let context = self.current()?;
        if self.cuda.modules.modules.get(&handle) == Some(&context) {
            return Ok(());
        }
        self.broken("KER-2", INVALID_HANDLE)
    }
}

entries! {
    Cuda, symbol, also [];

    fn cuModuleLoadData(module: *mut usize, image: *const c_char) in Here, |w| {
        let context = w.free_context()?;
        w.forbid("ARG-1", INVALID_VALUE, image.is_null())?;
        // PTX is a string that ends with a zero byte.
        let text = CStr::from_ptr(image).to_string_lossy();
        let has = |name: &str| text.contains(&format!(".visible .entry {name}("));
        w.forbid("KER-1", INVALID_PTX, !has("pinpool_spread") || !has("pinpool_collect"))?;
        let made = w.fresh();
        w.cuda.modules.modules.insert(made, context);
        w.give(module, made)
    }

    fn cuModuleUnload(module: usize) in Of(module), |w| {
        w.unsafe_call()?;
        w.module(module)?;
        let last = |s: &Stream| {
            let of = |op: &Op| matches!(op, Op::Kernel(launch) if launch.module == module);
            s.queue.iter().rposition(of).map(|at| s.done + at as u64 + 1)
        };
        let queued: Vec<_> = w.streams.iter().filter_map(|(h, s)| last(s).map(|upto| (*h, upto))).collect();
        for (stream, upto) in queued {
            w.let_pass("KER-8");
            w.run(stream, upto);
        }
        w.cuda.modules.modules.remove(&module);
        w.cuda.modules.functions.retain(|_, f| f.module != module);
        Ok(())
    }

    /// It may load the function.
    fn cuModuleGetFunction(function: *mut usize, module: usize, text: *const c_char) in Of(module), |w| {
        w.unsafe_call()?;
        w.module(module)?;
        w.forbid("ARG-1", INVALID_VALUE, text.is_null())?;
        let way = match CStr::from_ptr(text).to_bytes() {
            b"pinpool_spread" => Way::Spread,
            b"pinpool_collect" => Way::Collect,
            _ => return w.broken("KER-3", NOT_FOUND),
        };
        let made = w.fresh();
        w.cuda.modules.functions.insert(made, Function { module, way });
        w.give(function, made)
    }

    /// Of CUDA 12.4.
    fn cuFuncLoad(function: usize) in Of(function), |w| {
        w.unsafe_call()?;
        w.function(function).map(drop)
    }

    fn cuLaunchKernel(
        function: usize,
        blocks_x: c_uint,
        blocks_y: c_uint,
        blocks_z: c_uint,
        threads_x: c_uint,
        threads_y: c_uint,
        threads_z: c_uint,
        shared: c_uint,
        stream: usize,
        parameters: *const *const Runs,
        extra: usize,
    ) in Of(stream), |w| {
        let Function { module, way } = w.function(function)?;
        let captured = w.stream(stream)?.capture.is_some();
        let (blocks, threads) = ([blocks_x, blocks_y, blocks_z], [threads_x, threads_y, threads_z]);
        let fits = (blocks, threads, shared, extra) == (BLOCKS, THREADS, 0, 0);
        w.forbid("KER-4", INVALID_VALUE, !fits)?;
        w.forbid("ARG-1", INVALID_VALUE, parameters.is_null())?;
        // Both kernels have one parameter, of this type.
        let runs = parameters.read().read();
        let count = runs.count as usize;
        w.let_pass_if("KER-5", !(1..=RUNS).contains(&count));
        w.let_pass_if("KER-7", captured);
        let launch = Launch { context: w.current()?, module, way, runs: runs.run[..count.min(RUNS)].to_vec() };
        w.submit(stream, Op::Kernel(launch)).map(drop)
    }
}
