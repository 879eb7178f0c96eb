//! Scripts of calls, for simulated drivers of both vendors and for a real driver: each breaks a rule on purpose, without
//! pinpool in between, and the call must give its code and write down that rule and no other.
//!
//! A *script* has a line for each call, or several with `; ` between them:
//!
//! | line | what it does |
//! | --- | --- |
//! | `1 MemFree m+8 ! MEM-7` | the call, named without `cu` and `_v2` (or `aclrt`), gives that code and breaks that rule |
//! | `... ? 0 WHY`, `... ? - WHY` | a driver gives that code instead; the driver is not asked (behind the name of a script: all of it) |
//! | `0 CtxGetCurrent & -> own`, `0 StreamGetId 2 & => mine` | what it writes to the place that `&` stands for (`_`: any) is that number; is `mine` from now on |
//! | `s = StreamCreate 1` | a call that writes to its first argument succeeds; `s` is what it wrote |
//! | `0 up m page 64 s`, `0 down page m 64 s`, `0 register page 64` | copies to device memory `m`, and back; registers memory |
//! | `0 batch 0:1 s m page 1024 4` | a batch of 4 copies of 1024 bytes next to each other (and more of them), with attributes from copy 0 on |
//! | `rows = rows m,0,16`, `0 launch f 16 s m table 1` | rows of a table (place, offset, length) in host memory; a kernel in 16 blocks |
//! | `page is 7x100 1x5`, `page becomes 3x64` | these bytes are there; waits until they are |
//! | `stall s`, `release` | nothing that is submitted to the stream runs for a while |
//! | `e completes`, `finish s` | asks until the event is complete; waits for the stream on a real driver |
//! | `elsewhere`, `beside`, `each`, `race` | on a thread without a context; with it; here and beside; here and beside at once |
//! | `here`, `sim hang true` | on the simulation alone; a command to it |
//!
//! There are four pages of host memory `page`. Unless the script begins with `bare`, the context of device `d0` is
//! current, and there are a stream `s`, an event `e`, device memory `m` (4096 bytes, of Ascend 64) and, of Ascend, 256
//! bytes `h` of the library's host memory.

#![allow(unsafe_code, reason = "calling a driver")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pinpool_sim::cuda::Driver;

use crate::support::doubles::{self, HANG, StandIn, gpu_name, npu_name};
use crate::support::kernels::{HEAP, Kernels};
use crate::support::skip;

/// What a script says that lacks a device.
pub const SHORT: &str = "there is one GPU, and the rule needs two";
const PAGE: usize = 4096;
/// pinpool's own kernels.
const KERNELS: &str = concat!(include_str!("../../src/device/cuda/spread/kernels.ptx"), "\0");
const NO_KERNELS: &std::ffi::CStr = c".version 6.0\n.target sm_70\n.address_size 64\nno kernels\n";

/// Memory that begins and ends with a page, so that a driver that counts in pages sees what the script means.
#[repr(C, align(4096))]
struct Pages([u8; 4 * PAGE]);

/// `cuDeviceGetCount`, and what it says to a destructor.
static ASKED: AtomicUsize = AtomicUsize::new(0);
static ANSWER: AtomicU32 = AtomicU32::new(0);

/// A destructor that calls the driver.
unsafe extern "C" fn asks(_: *mut c_void) {
    let mut count = 0;
    // SAFETY: the address of that very function, and a place for a number.
    let answer = unsafe {
        let ask = std::mem::transmute::<usize, unsafe extern "C" fn(*mut i32) -> u32>;
        ask(ASKED.load(Ordering::SeqCst))(&raw mut count)
    };
    ANSWER.store(answer, Ordering::SeqCst);
}

unsafe extern "C" fn idle(_: *mut c_void) {}

/// What the words of a script stand for, on a machine of its own or on a real driver.
pub struct Script {
    raw: StandIn,
    pub real: bool,
    /// On an Ascend library.
    acl: bool,
    words: BTreeMap<String, usize>,
    /// What differs on a real driver from what the script says.
    pub wrong: Vec<String>,
    /// There is no second device for the rest.
    short: bool,
    /// What keeps a real GPU's stream busy.
    kernels: Option<Kernels<'static>>,
}

impl Script {
    /// Nothing is initialised.
    fn bare(driver: StandIn, real: bool) -> Self {
        if !real {
            driver.command("bare");
        }
        let acl = driver.has("aclInit") && !driver.has("cuInit");
        if !acl {
            // SAFETY: cuda.h has the signature.
            let ask = unsafe { driver.get::<unsafe extern "C" fn(*mut i32) -> u32>("cuDeviceGetCount") };
            ASKED.store(ask as usize, Ordering::SeqCst);
        }
        let name = |at: usize| if acl { npu_name(at) } else { gpu_name(at) };
        let device = |at: usize| if real { at } else { name(at).split_once(':').unwrap().1.parse().unwrap() };
        let page = Box::leak(Box::new(Pages([1; 4 * PAGE]))).0.as_mut_ptr() as usize;
        let map = memmap2::MmapMut::map_anon(PAGE).unwrap().make_read_only().unwrap();
        let readonly = Box::leak(Box::new(map)).as_ptr() as usize;
        let scratch = Box::leak(Box::new([0_u64; 8])).as_mut_ptr() as usize;
        let words = [
            ("d0", device(0)),
            ("d1", device(1)),
            ("d2", device(2)),
            ("page", page),
            ("readonly", readonly),
            ("_", scratch),
            ("relaxed", Box::leak(Box::new(2_u32)) as *mut u32 as usize),
            ("names", Box::leak(Box::new([99_i32])).as_ptr() as usize),
            // CU_POINTER_ATTRIBUTE_MEMORY_TYPE.
            ("kind", Box::leak(Box::new([2_i32])).as_ptr() as usize),
            ("places", Box::leak(Box::new([scratch])).as_ptr() as usize),
            ("asks", asks as *const () as usize),
            ("idle", idle as *const () as usize),
            ("kernels", KERNELS.as_ptr() as usize),
            ("nokernels", NO_KERNELS.as_ptr() as usize),
            ("spread", c"pinpool_spread".as_ptr() as usize),
            ("collect", c"pinpool_collect".as_ptr() as usize),
            ("nofunction", c"pinpool_other".as_ptr() as usize),
        ];
        let words = words.map(|(name, value)| (name.to_owned(), value)).into();
        Self { raw: driver, real, acl, words, wrong: Vec::new(), short: false, kernels: None }
    }

    pub fn run(driver: StandIn, real: bool, script: &str) -> Self {
        let mut on = Self::bare(driver, real);
        if !script.starts_with("bare\n") {
            let start = match on.acl {
                false => {
                    "0 Init 0\ncontext = DevicePrimaryCtxRetain d0\n0 CtxSetCurrent context\nm = memory 4096"
                }
                true => "0 aclInit 0\n0 SetDevice d0\nm = memory 64\nh = host 256",
            };
            start.lines().chain(["s = stream", "e = event"]).for_each(|line| on.line(line));
        }
        if real && script.contains("stall ") {
            // Before anything is stalled: loading a module may wait for that.
            let raw: &'static _ = Box::leak(Box::new(on.raw.clone()));
            on.kernels = Some(Kernels::load(raw));
        }
        for line in script.lines() {
            if !on.short {
                on.line(line);
            }
        }
        on
    }

    pub fn line(&mut self, line: &str) {
        let seen = self.broken().len();
        let (text, on_driver) = line.split_once(" ? ").map_or((line, None), |(text, why)| (text, Some(why)));
        let (what, rules) = text.split_once(" ! ").unwrap_or((text, ""));
        let known = on_driver.and_then(|why| why.split(' ').next());
        if self.real && known == Some("-") {
            return tell(&format!("{line}: the driver is not asked"));
        }
        match what.split_once(' ') {
            Some(("here", _)) if self.real => return,
            Some(("here", rest)) => self.steps(rest, None),
            Some(("elsewhere", rest)) => self.on_a_thread(false, rest, known),
            Some(("beside", rest)) => self.on_a_thread(true, rest, known),
            Some(("each", rest)) => {
                self.steps(rest, known);
                self.on_a_thread(true, rest, known);
            }
            Some(("race", rest)) => self.race(&rest.split(' ').collect::<Vec<_>>()[1..]),
            _ => self.steps(what, known),
        }
        let mut broken = self.broken().split_off(seen);
        if what.starts_with("race ") {
            broken.dedup();
        }
        assert!(self.real || broken.join(" ") == rules, "{line}: {broken:?}");
    }

    fn broken(&self) -> Vec<String> {
        if self.real { Vec::new() } else { self.raw.broken() }
    }

    fn steps(&mut self, text: &str, known: Option<&str>) {
        text.split("; ").for_each(|step| self.step(step, known));
    }

    fn on_a_thread(&mut self, has_context: bool, text: &str, known: Option<&str>) {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.raw.enter();
                if has_context {
                    self.steps("0 CtxPushCurrent context", None);
                }
                self.steps(text, known);
            });
            thread.join().expect("the other thread");
        });
    }

    /// Makes a call on two threads until a rule is broken.
    fn race(&self, words: &[&str]) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                self.raw.enter();
                self.call(&["CtxPushCurrent", "context"], &mut 0);
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(self.call(words, &mut 0), 0);
                }
            });
            while self.broken().is_empty() {
                assert_eq!(self.call(words, &mut 0), 0);
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    fn step(&mut self, step: &str, known: Option<&str>) {
        let words: Vec<&str> = step.split(' ').collect();
        match words[..] {
            ["bare"] => {}
            ["two", "devices"] => {
                let mut count = 0;
                self.call(&["DeviceGetCount", "&"], &mut count);
                self.short = count < 2;
                if self.short {
                    tell(SHORT);
                }
            }
            ["sim", ..] => drop(self.raw.command(&step["sim ".len()..])),
            ["left", ..] => assert_eq!(self.raw.report().leaks.join(", "), step["left ".len()..]),
            ["answered", code] => {
                while ANSWER.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                assert_eq!(ANSWER.load(Ordering::SeqCst) as usize, self.word(code));
            }
            ["fill", name, byte] => {
                let len = if self.acl { 256 } else { PAGE };
                // SAFETY: scripts fill host memory that has so many bytes.
                unsafe { (self.word(name) as *mut u8).write_bytes(self.word(byte) as u8, len) };
            }
            ["filled", byte] => {
                let fills = format!("0 register page 16384; fill page {byte}; 0 up m page 4096 s");
                self.steps(&fills, None);
                self.steps("0 StreamSynchronize s; fill page 0", None);
            }
            ["stall", stream] => match &self.kernels {
                // Far longer than the calls meanwhile take.
                Some(kernels) => kernels.spin(300_000_000, self.word(stream)),
                None => self.raw.hang(true),
            },
            ["release"] => {
                if !self.real {
                    self.raw.hang(false);
                }
            }
            ["finish", stream] => {
                // Its code does not matter: the stream may be the one that was misused.
                if self.real {
                    self.call(&["StreamSynchronize", stream], &mut 0);
                }
            }
            [one, "differs", other] => assert_ne!(self.word(one), self.word(other), "{step}"),
            [one, "equals", other] => assert_eq!(self.word(one), self.word(other), "{step}"),
            [name, "holds", number] => {
                // SAFETY: the place of a number.
                let found = unsafe { *(self.word(name) as *const u32) };
                assert_eq!(found as usize, self.word(number), "{step}");
            }
            [name, how @ ("is" | "becomes"), ref runs @ ..] => {
                let run = |run: &&str| {
                    let (byte, count) = run.split_once('x').unwrap_or((run, "64"));
                    vec![self.word(byte) as u8; self.word(count)]
                };
                let (expected, since): (Vec<u8>, _) = (runs.iter().flat_map(run).collect(), Instant::now());
                let found = || self.read(self.word(name), expected.len());
                while how == "becomes" && found() != expected && since.elapsed() < HANG {
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert!(found() == expected, "{step}: {:?}", found());
            }
            [name, "completes"] => {
                let since = Instant::now();
                let mut status = 0;
                while match self.acl {
                    false => self.call(&["EventQuery", name], &mut 0) != 0,
                    true => self.call(&["QueryEventStatus", name, "&"], &mut status) != 0 || status != 1,
                } {
                    assert!(since.elapsed() < HANG, "{step}");
                }
            }
            [name, "=", "malloc", len] => self.set(name, self.device_malloc(self.word(len))),
            [name, "=", "rows", ref rows @ ..] => {
                let row = |row: &&str| {
                    let parts: Vec<u64> = row.split(',').map(|word| self.word(word) as u64).collect();
                    [parts[0], parts[2] << 32 | parts[1]]
                };
                let text: Vec<u64> = rows.iter().flat_map(row).collect();
                self.set(name, text.leak().as_ptr() as usize);
            }
            [name, "=", call, ref rest @ ..] => {
                let (call, more) = match call {
                    "kernel" => {
                        self.step("module = ModuleLoadData kernels", None);
                        ("ModuleGetFunction", &["module", rest[0]][..])
                    }
                    // ACL_EVENT_SYNC and ACL_EVENT_CAPTURE_STREAM_PROGRESS.
                    "event" if self.acl => ("CreateEventExWithFlag", &["3"][..]),
                    "event" => ("EventCreate", &["2"][..]),
                    "stream" if self.acl => ("CreateStream", rest),
                    "stream" => ("StreamCreate", &["1"][..]),
                    "memory" if self.acl => ("Malloc", &[rest[0], "0"][..]),
                    "memory" => ("MemAlloc", rest),
                    "host" => ("MallocHost", rest),
                    call => (call, rest),
                };
                let mut made = 0;
                assert_eq!(self.call(&[&[call, "&"], more].concat(), &mut made), 0, "{step}");
                self.set(name, made);
            }
            [code, ref call @ .., arrow @ ("->" | "=>"), result] => {
                let wrote = self.says(step, code, call, known);
                match arrow {
                    "->" => assert_eq!(wrote, self.word(result), "{step}"),
                    _ => self.set(result, wrote),
                }
            }
            [code, ref call @ ..] => drop(self.says(step, code, call, known)),
            [] => {}
        }
    }

    /// Makes a call and sees what it says. On the simulation another code fails at once; on a real driver the
    /// script goes on, so that one run tells everything. Returns what it wrote.
    fn says(&mut self, step: &str, code: &str, call: &[&str], known: Option<&str>) -> usize {
        let (expected, mut wrote) = (self.word(code) as u32, 0);
        if !self.real {
            assert_eq!(self.call(call, &mut wrote), expected, "{step}");
            return wrote;
        }
        tell(step);
        let code = self.call(call, &mut wrote);
        let wrong = match known.map(|code| code.parse::<u32>().expect("a code")) {
            None if code != expected => "a difference that is not listed",
            Some(_) if code == expected => "it is listed, and the driver does not differ",
            Some(known) if code != known => "it differs, and not as the list says",
            _ => return wrote,
        };
        let text = format!("{step}: the driver says {code}: {wrong}");
        tell(&text);
        self.wrong.push(text);
        wrote
    }

    fn set(&mut self, name: &str, value: usize) {
        self.words.insert(name.to_owned(), value);
    }

    /// A number, or what a name stands for, or more or less than that: `m+64`.
    fn word(&self, word: &str) -> usize {
        let at = word[1..].find(['+', '-']).map_or(word.len(), |at| at + 1);
        let number = |text: &str| text.parse::<i64>().map(|number| number as usize);
        let known = self.words.get(&word[..at]).copied();
        let base = known
            .unwrap_or_else(|| number(&word[..at]).unwrap_or_else(|_| panic!("no number or name: {word}")));
        if at == word.len() { base } else { base.wrapping_add(number(&word[at..]).expect("a number")) }
    }

    /// Makes a call; `&` among its arguments stands for `place`.
    fn call(&self, words: &[&str], place: &mut usize) -> u32 {
        let (call, rest) = words.split_first().expect("a call");
        if *call == "batch" {
            return self.batch(rest, place);
        }
        let at = std::ptr::from_mut(place) as usize;
        let given: Vec<usize> =
            rest.iter().map(|word| if *word == "&" { at } else { self.word(word) }).collect();
        match (*call, &given[..]) {
            ("up", [to, from, len, stream]) if self.acl => {
                self.entry("MemcpyAsync", &[*to, *len, *from, *len, 1, *stream])
            }
            ("down", [to, from, len, stream]) if self.acl => {
                self.entry("MemcpyAsync", &[*to, *len, *from, *len, 2, *stream])
            }
            ("up", _) => self.entry("MemcpyHtoDAsync", &given),
            ("down", _) => self.entry("MemcpyDtoHAsync", &given),
            ("register", [start, len]) => self.entry("MemHostRegister", &[*start, *len, 1]),
            ("launch", [function, blocks, stream, packed, table, rows]) => {
                // The kernels' parameter: runs of packed bytes, table and number of rows, and the number of
                // runs.
                let mut runs = [0_usize; 97];
                (runs[0], runs[1], runs[2], runs[96]) = (*packed, *table, *rows, 1);
                let given = [runs.as_ptr()];
                let shape = [*function, *blocks, 1, 1, 512, 1, 1, 0, *stream, given.as_ptr() as usize, 0];
                self.entry("LaunchKernel", &shape)
            }
            _ => self.entry(call, &given),
        }
    }

    /// A batch of copies, and at which one it failed.
    fn batch(&self, words: &[&str], fault: &mut usize) -> u32 {
        let (sets, stream) = (words[0], self.word(words[1]));
        let (mut targets, mut sources, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for part in words[2..].chunks(4) {
            let [to, from, len, count] = [0, 1, 2, 3].map(|at| self.word(part[at]));
            targets.extend((0..count).map(|n| to + n * len));
            sources.extend((0..count).map(|n| from + n * len));
            lengths.extend((0..count).map(|_| len));
        }
        // cuda.h's `CUmemcpyAttributes`: the order in which sources are read, and nothing about locations.
        let set = |text: &str| {
            let (first, order) = text.split_once(':').expect("where the attributes begin, and the order");
            (self.word(first), [self.word(order) as u32, 0, 0, 0, 0, 0])
        };
        let (firsts, attributes): (Vec<usize>, Vec<[u32; 6]>) = sets.split(',').map(set).unzip();
        let lists = [targets.as_ptr() as usize, sources.as_ptr() as usize, lengths.as_ptr() as usize];
        let with = [attributes.as_ptr() as usize, firsts.as_ptr() as usize, firsts.len()];
        let last = [std::ptr::from_mut(fault) as usize, stream];
        self.entry("MemcpyBatchAsync", &[&lists[..], &[targets.len()], &with, &last].concat())
    }

    fn entry(&self, name: &str, given: &[usize]) -> u32 {
        if self.acl {
            let whole = if name.starts_with("acl") { name.to_owned() } else { format!("aclrt{name}") };
            return self.raw.call(&whole, given);
        }
        let newer = format!("cu{name}_v2");
        let has_newer = Driver::Cuda12_8.symbol(&newer).is_some();
        self.raw.call(&if has_newer { newer } else { format!("cu{name}") }, given)
    }

    /// What is there: of Ascend in device memory, too, by a copy that is made at once.
    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        if self.acl && at >> 47 != 0 {
            let mut bytes = vec![0; len];
            assert_eq!(self.entry("Memcpy", &[bytes.as_mut_ptr() as usize, len, at, len, 2]), 0);
            return bytes;
        }
        // SAFETY: scripts look at memory that has so many bytes; a device may be writing there.
        (0..len).map(|nth| unsafe { (at as *const u8).add(nth).read_volatile() }).collect()
    }

    /// Memory of the device's heap, on a real driver by a kernel's malloc.
    fn device_malloc(&self, len: usize) -> usize {
        if !self.real {
            return self.raw.command(&format!("malloc 0 {len}")).parse().unwrap();
        }
        let (raw, mut word) = (&self.raw, [0; 8]);
        let (kernel, stream, out) = (raw.kernel(HEAP, c"heap_alloc"), raw.stream(), raw.memory(8));
        raw.start(kernel, 1, 1, stream, &[len as u64, out as u64]);
        raw.synchronize(stream);
        raw.fetch(out, &mut word);
        assert_ne!(word, [0; 8], "the kernel's malloc gave nothing");
        usize::from_le_bytes(word)
    }
}

/// A line for the reader, whatever the test harness captures.
pub fn tell(text: &str) {
    use std::io::Write;
    // Where no process reads it nothing is lost.
    let _ = writeln!(std::io::stdout().lock(), "\n{text}");
}

/// The scripts of a text by their names, whose lines are not indented.
pub fn scripts(text: &str) -> Vec<(&str, String)> {
    let mut all: Vec<(&str, String)> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match (line.strip_prefix("    "), all.last_mut()) {
            (Some(line), Some((_, script))) => script.push_str(&format!("{line}\n")),
            _ => all.push((line, String::new())),
        }
    }
    all
}

/// The page of the simulation lists these rules in a vendor's column, and no others.
pub fn are_listed<'a>(rules: impl Iterator<Item = &'a str>, column: usize) {
    match doubles::rules(column) {
        Some(listed) => assert_eq!(listed, rules.map(str::to_owned).collect()),
        None => skip!("the page of the simulation's rules is not here"),
    }
}
