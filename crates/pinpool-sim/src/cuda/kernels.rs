//! pinpool's two kernels: a module that has them, launches, and what they do when a stream comes to them.
//!
//! There is nothing here that could run PTX: an image is taken for pinpool's if it has the entries `pinpool_spread` and
//! `pinpool_collect`, and what those do is written down once more. The parameter is read at the launch, as a driver
//! reads it, and the tables of rows when the kernel runs. The rows are copied last first, since no program may rely on
//! their order.
//!
//! A kernel that touches memory which is not there ends its context with 700 (illegal address), as on a GPU.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint};

use super::calls::write;
use super::world::*;
use crate::common::entries;

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
        self.block(at, len).is_some_and(|(block, _)| block.context == context)
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

    /// A stream has come to a kernel.
    pub fn run_kernel(&mut self, launch: &Launch) {
        let fault = |w: &mut Self, code, text: String| {
            w.let_pass("KER-5", text);
            w.kill(launch.context, code);
        };
        let (mut copies, mut read) = (Vec::new(), Vec::new());
        for run in &launch.runs {
            if run.table % ROW as u64 != 0 {
                return fault(self, MISALIGNED_ADDRESS, format!("a table at {:#x}", run.table));
            }
            let Some(rows) = self.rows(launch.context, run) else {
                let text = format!("a table of {} rows at {:#x}", run.rows, run.table);
                return fault(self, ILLEGAL_ADDRESS, text);
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
        let written = copies.iter().map(|(_, dst, len)| (*dst, *len)).collect();
        let read = read.into_iter().chain(copies.iter().map(|(src, _, len)| (*src, *len)));
        if let Some((at, len)) = meeting(written, read) {
            self.let_pass("KER-6", format!("{len} bytes at {at:#x} meet what another row writes"));
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

entries! {
    cuda;

    fn cuModuleLoadData(module: *mut usize, image: *const c_char) in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        if image.is_null() {
            return w.violate("ARG-1", name, INVALID_VALUE);
        }
        // PTX is a string that ends with a zero byte.
        let text = CStr::from_ptr(image).to_string_lossy();
        let has = |name: &str| text.contains(&format!(".visible .entry {name}("));
        if !has("pinpool_spread") || !has("pinpool_collect") {
            return w.violate("KER-1", "an image without the two kernels", INVALID_PTX);
        }
        let made = w.fresh();
        w.modules.modules.insert(made, context);
        write(w, name, module, made)
    }

    fn cuModuleUnload(module: usize) in of(module), |w, name| {
        w.unsafe_call(name)?;
        let handle = w.module(name, module)?;
        let last = |s: &Stream| {
            let of = |op: &Op| matches!(op, Op::Kernel(launch) if launch.module == handle);
            s.queue.iter().rposition(of).map(|at| s.done + at as u64 + 1)
        };
        let queued: Vec<_> = w.streams.iter().filter_map(|(h, s)| last(s).map(|upto| (*h, upto))).collect();
        for (stream, upto) in queued {
            let text = format!("{handle:#x} is used by a queued kernel");
            w.let_pass("KER-8", text);
            w.run(stream, upto);
        }
        w.modules.modules.remove(&handle);
        w.modules.functions.retain(|_, f| f.module != handle);
        Ok(())
    }

    fn cuModuleGetFunction(
        function: *mut usize,
        module: usize,
        text: *const c_char,
    ) in of(module), |w, name| {
        // It may load the function.
        w.unsafe_call(name)?;
        let module = w.module(name, module)?;
        if text.is_null() {
            return w.violate("ARG-1", name, INVALID_VALUE);
        }
        let way = match CStr::from_ptr(text).to_bytes() {
            b"pinpool_spread" => Way::Spread,
            b"pinpool_collect" => Way::Collect,
            other => {
                let text = format!("no function {}", String::from_utf8_lossy(other));
                return w.violate("KER-3", text, NOT_FOUND);
            }
        };
        let made = w.fresh();
        w.modules.functions.insert(made, Function { module, way });
        write(w, name, function, made)
    }

    /// Of CUDA 12.4.
    fn cuFuncLoad(function: usize) in of(function), |w, name| {
        w.unsafe_call(name)?;
        w.function(name, function).map(drop)
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
    ) in of(stream), |w, name| {
        let function = w.function(name, function)?;
        let captured = w.stream(name, stream)?.capture.is_some();
        let (blocks, threads) = ([blocks_x, blocks_y, blocks_z], [threads_x, threads_y, threads_z]);
        if (blocks, threads, shared) != (BLOCKS, THREADS, 0) || extra != 0 {
            let text = format!("{name}: {blocks:?} blocks of {threads:?} threads, {shared} bytes shared");
            return w.violate("KER-4", text, INVALID_VALUE);
        }
        if parameters.is_null() {
            return w.violate("ARG-1", name, INVALID_VALUE);
        }
        // Both kernels have one parameter, of this type.
        let runs = parameters.read().read();
        let count = runs.count as usize;
        if !(1..=RUNS).contains(&count) {
            w.let_pass("KER-5", format!("{name}: {count} runs"));
        }
        if captured {
            w.let_pass("KER-7", format!("{name} on {stream:#x}"));
        }
        let launch = Launch {
            context: w.current(name)?,
            module: function.module,
            way: function.way,
            runs: runs.run[..count.min(RUNS)].to_vec(),
        };
        w.submit(name, stream, Op::Kernel(launch)).map(drop)
    }
}
