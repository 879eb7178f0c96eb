//! Rules of the stand-in about modules and kernels.

use crate::standin::probe::Driver;

/// pinpool's own kernels.
const PTX: &str = concat!(include_str!("../../../../src/device/cuda/spread/kernels.ptx"), "\0");

/// Both kernels' parameter: runs of packed bytes, table and number of rows, and the number of runs.
type Runs = [u64; 97];

/// One run.
fn run(packed: usize, table: usize, rows: usize) -> Runs {
    let mut runs = [0; 97];
    runs[..3].copy_from_slice(&[packed as u64, table as u64, rows as u64]);
    runs[96] = 1;
    runs
}

/// A row of a table, as two words: its place; its offset and length.
fn row(place: usize, offset: usize, len: usize) -> [u64; 2] {
    [place as u64, (len as u64) << 32 | offset as u64]
}

impl Driver {
    /// A module of both kernels, and the one that spreads.
    fn kernel(&self) -> (usize, usize) {
        let module = made!(self, "cuModuleLoadData", PTX.as_ptr());
        (module, made!(self, "cuModuleGetFunction", module, c"pinpool_spread".as_ptr()))
    }

    /// A step that launches a kernel in pinpool's shape, but for the number of blocks.
    fn launches(&self, code: u32, function: usize, blocks: usize, stream: usize, runs: &Runs) {
        let parameters = [runs.as_ptr()];
        says!(
            self,
            code,
            "cuLaunchKernel",
            function,
            blocks,
            1,
            1,
            512,
            1,
            1,
            0,
            stream,
            parameters.as_ptr(),
            0
        );
    }

    /// Device memory with these words.
    fn words(&self, words: &[u64], stream: usize) -> usize {
        let memory = self.memory(words.len() * 8);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(self.upload(memory, &bytes, stream), 0);
        assert_eq!(call!(self, "cuStreamSynchronize", stream), 0);
        memory
    }
}

rules! {
    KERNELS:

    ker_1_a_module_has_both_kernels (ready) |d| {
        let mut module = 0_usize;
        let broken = c".version 6.0\n.target sm_70\n.address_size 64\nno kernels\n";
        says!(d, 218, "cuModuleLoadData", &raw mut module, broken.as_ptr());
        d.broken(&["KER-1"]);
        says!(d, 0, "cuModuleLoadData", &raw mut module, PTX.as_ptr());
        says!(d, 0, "cuModuleUnload", module);
        assert!(!d.is_stand_in() || d.stand_in.report().leaks == ["contexts 1"]);
    }

    ker_2_modules_and_functions_that_are_gone (ready) |d| {
        let (stream, mut function) = (d.stream(), 0_usize);
        let module = made!(d, "cuModuleLoadData", PTX.as_ptr());
        says!(d, 0, "cuModuleGetFunction", &raw mut function, module, c"pinpool_collect".as_ptr());
        says!(d, 0, "cuFuncLoad", function);
        says!(d, 0, "cuModuleUnload", module);
        says!(d, 400, "cuModuleUnload", module);
        says!(d, 400, "cuModuleGetFunction", &raw mut function, module, c"pinpool_spread".as_ptr());
        d.launches(400, function, 16, stream, &run(0, 0, 0));
        d.broken(&["KER-2"; 3]);
    }

    ker_3_functions_that_a_module_has (ready) |d| {
        let (module, mut function) = (d.kernel().0, 0_usize);
        says!(d, 500, "cuModuleGetFunction", &raw mut function, module, c"pinpool_other".as_ptr());
        d.broken(&["KER-3"]);
        says!(d, 0, "cuModuleUnload", module);
    }

    ker_4_a_launch_has_pinpools_shape (ready) |d| {
        let ((module, function), stream) = (d.kernel(), d.stream());
        d.launches(1, function, 0, stream, &run(0, 0, 0));
        d.broken(&["KER-4"]);
        // With its shape it copies, when the stream comes to it: the table is written behind the launch's call.
        let (memory, table) = (d.words(&[7; 64], stream), d.words(&[0; 4], stream));
        let rows = [row(memory + 257, 3, 100), row(memory + 400, 3, 5)].concat();
        let late: Vec<u8> = rows.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(d.upload(memory, &[1; 110], stream), 0);
        assert_eq!(d.upload(table, &late, stream), 0);
        d.launches(0, function, 16, stream, &run(memory, table, 2));
        says!(d, 0, "cuStreamSynchronize", stream);
        let mut back = d.pages(1, 0);
        assert_eq!(d.download(&mut back[..512], memory, stream), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        let ones: Vec<usize> = (110..512).filter(|i| back[*i] == 1).collect();
        assert!(ones == (257..357).chain(400..405).collect::<Vec<_>>(), "{ones:?}");
        says!(d, 0, "cuModuleUnload", module);
    }

    ker_5_kernels_touch_device_memory (ready) |d| {
        let ((_, function), stream) = (d.kernel(), d.stream());
        let memory = d.words(&[7; 64], stream);
        let table = d.words(&row(64, 0, 16), stream);
        d.launches(0, function, 16, stream, &run(memory, table, 1));
        says!(d, 700, "cuStreamSynchronize", stream);
        d.broken(&["KER-5"]);
        says!(d, 700, "cuStreamSynchronize", stream);
    }

    ker_6_no_row_meets_what_another_one_writes (ready) |d| {
        let ((module, function), stream) = (d.kernel(), d.stream());
        let memory = d.words(&[7; 64], stream);
        let twice = d.words(&[row(memory + 128, 0, 16), row(memory + 143, 16, 16)].concat(), stream);
        let read = d.words(&[row(memory + 128, 0, 16), row(memory + 15, 64, 1)].concat(), stream);
        d.launches(0, function, 16, stream, &run(memory, twice, 2));
        d.launches(0, function, 16, stream, &run(memory, read, 2));
        says!(d, 0, "cuStreamSynchronize", stream);
        d.broken(&["KER-6"; 2]);
        says!(d, 0, "cuModuleUnload", module);
    }

    ker_7_not_in_a_capture (ready) |d| {
        let ((module, function), stream) = (d.kernel(), d.stream());
        let mut graph = 0_usize;
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        d.launches(0, function, 16, stream, &run(0, 0, 0));
        says!(d, 0, "cuStreamEndCapture", stream, &raw mut graph);
        d.broken(&["KER-7"]);
        says!(d, 0, "cuGraphDestroy", graph);
        says!(d, 0, "cuModuleUnload", module);
    }

    ker_8_a_module_whose_kernel_is_queued (ready) |d| {
        let ((module, function), stream) = (d.kernel(), d.stream());
        let memory = d.words(&[7; 64], stream);
        let table = d.words(&row(memory + 128, 0, 16), stream);
        d.launches(0, function, 16, stream, &run(memory, table, 1));
        says!(d, 0, "cuModuleUnload", module);
        d.broken(&["KER-8"]);
        // Memory that a queued kernel uses is freed, too.
        let (module, function) = d.kernel();
        d.launches(0, function, 16, stream, &run(memory, table, 1));
        says!(d, 0, "cuMemFree_v2", memory);
        d.broken(&["KER-8", "MEM-8"]);
        says!(d, 0, "cuModuleUnload", module);
    }
}
