//! The simulated library keeps its rules: each is broken on purpose, without pinpool in between, and the call must
//! give its code and write down that rule and no other.
//!
//! A *script* has a line for each call:
//!
//! | line | what it does |
//! | --- | --- |
//! | `107000 Free m ! MEM-7` | the call, named without `aclrt`, gives that code and breaks that rule |
//! | `0 QueryEventStatus e & -> 1` | it writes that number to the place that `&` stands for; `it` is what was written last |
//! | `s = CreateStream` | a call that writes to its first argument succeeds; `s` is what it wrote |
//! | `0 up m h 64 s`, `0 down h m 64 s` | copies 64 bytes from host memory `h` to device memory `m`, and back |
//! | `fill h 7`, `m is 7` | writes to 256 bytes of host memory; the first 64 bytes of any memory are that |
//! | `e completes` | asks until the event is complete |
//! | `elsewhere ...` | the line, on a thread that has no context |
//! | `left streams 1, events 1` | the report has exactly this under "leak" |
//! | `sim hang true` | a command to the simulation |
//!
//! Library and device 0 are ready, and there are a stream `s`, an event `e`, 64 bytes of device memory `m` and 256
//! bytes of host memory `h`, unless the script begins with `bare`.

mod rules;

use std::collections::{BTreeMap, BTreeSet};

use pinpool_sim::acl::Library;

use crate::support::doubles::gpu::until;
use crate::support::doubles::{self, StandIn, npu_name};
use crate::support::skip;

/// What the words of a script stand for, on a machine of its own.
struct Script {
    stand_in: StandIn,
    words: BTreeMap<String, usize>,
}

/// Memory that begins and ends with a page.
#[repr(C, align(4096))]
struct Pages([u8; 8192]);

impl Script {
    fn run(script: &str) {
        let page = Box::leak(Box::new(Pages([1; 8192]))).0.as_mut_ptr().expose_provenance();
        let nofile = c"/no/such/file.json".as_ptr().expose_provenance();
        let stand_in = StandIn::npus(Library::Today);
        let device = |at: usize| npu_name(at)["acl:".len()..].parse().unwrap();
        let words =
            [("d0", device(0)), ("d1", device(1)), ("d2", device(2)), ("page", page), ("nofile", nofile)];
        let mut on = Self { stand_in, words: words.map(|(name, value)| (name.to_owned(), value)).into() };
        let ready = "0 aclInit 0\n0 SetDevice d0\ns = stream\ne = event\nm = memory 64\nh = host 256";
        let first = if script.starts_with("bare\n") { "" } else { ready };
        first.lines().chain(script.lines()).for_each(|line| on.line(line));
    }

    fn line(&mut self, line: &str) {
        let seen = self.stand_in.report().violations.len();
        let (what, rule) = line.split_once(" ! ").unwrap_or((line, ""));
        self.step(what, &what.split(' ').collect::<Vec<_>>());
        let broken = self.stand_in.report().violations.split_off(seen);
        let ids: Vec<&str> = broken.iter().filter_map(|text| text.split(' ').next()).collect();
        assert_eq!(ids.join(" "), rule, "{line}: {broken:?}");
    }

    fn step(&mut self, line: &str, words: &[&str]) {
        match *words {
            ["bare"] => {}
            ["sim", ..] => drop(self.stand_in.command(&line["sim ".len()..])),
            ["left", ..] => assert_eq!(self.stand_in.report().leaks.join(", "), line["left ".len()..]),
            ["elsewhere", ref rest @ ..] => std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    self.stand_in.enter();
                    self.step(line, rest);
                });
                thread.join().expect("the other thread");
            }),
            ["fill", name, byte] => {
                let at = std::ptr::with_exposed_provenance_mut::<u8>(self.word(name));
                // SAFETY: scripts fill host memory that has so many bytes.
                unsafe { at.write_bytes(self.word(byte) as u8, 256) };
            }
            [name, "is", byte] => {
                assert_eq!(self.read(self.word(name)), [self.word(byte) as u8; 64], "{line}");
            }
            [name, "completes"] => {
                let status = ["QueryEventStatus", name, "&"];
                until(line, || self.call(&status) == 0 && self.word("it") == 1);
            }
            [name, "=", call, ref rest @ ..] => {
                let (call, more) = match call {
                    "stream" => ("CreateStream", &[][..]),
                    // ACL_EVENT_SYNC and ACL_EVENT_CAPTURE_STREAM_PROGRESS.
                    "event" => ("CreateEventExWithFlag", &["3"][..]),
                    "memory" => ("Malloc", &[rest[0], "0"][..]),
                    "host" => ("MallocHost", rest),
                    call => (call, rest),
                };
                assert_eq!(self.call(&[&[call, "&"], more].concat()), 0, "{line}");
                self.words.insert(name.to_owned(), self.word("it"));
            }
            [code, ref call @ .., "->", result] => {
                assert_eq!(self.call(call), self.word(code) as u32, "{line}");
                assert_eq!(self.word("it"), self.word(result), "{line}");
            }
            [code, ref call @ ..] => assert_eq!(self.call(call), self.word(code) as u32, "{line}"),
            [] => {}
        }
    }

    /// A number, or what a name stands for, or more than that: `h+64`.
    fn word(&self, word: &str) -> usize {
        let (name, more) = word.split_once('+').unwrap_or((word, "0"));
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => usize::from_str_radix(digits, 16),
            None => text.parse::<i64>().map(|number| number as usize),
        };
        let known = self.words.get(name).copied();
        known.unwrap_or_else(|| number(name).expect("a number or a name")) + number(more).expect("a number")
    }

    fn call(&mut self, words: &[&str]) -> u32 {
        let (call, rest) = words.split_first().expect("a call");
        let mut place = 0_usize;
        let of = |word: &&str| match *word {
            "&" => (&raw mut place).expose_provenance(),
            word => self.word(word),
        };
        let given: Vec<usize> = rest.iter().map(of).collect();
        let code = match (*call, &given[..]) {
            ("up", [to, from, len, stream]) => {
                self.entry("MemcpyAsync", &[*to, *len, *from, *len, 1, *stream])
            }
            ("down", [to, from, len, stream]) => {
                self.entry("MemcpyAsync", &[*to, *len, *from, *len, 2, *stream])
            }
            (name, given) => self.entry(name, given),
        };
        self.words.insert("it".into(), place);
        code
    }

    fn entry(&self, name: &str, given: &[usize]) -> u32 {
        let name = if name.starts_with("acl") { name.to_owned() } else { format!("aclrt{name}") };
        self.stand_in.call(&name, given)
    }

    /// 64 bytes of host memory, or of device memory by a copy that is made at once.
    fn read(&self, at: usize) -> [u8; 64] {
        let mut bytes = [0; 64];
        let to = bytes.as_mut_ptr();
        if at >> 47 == 0 {
            // SAFETY: scripts read memory that has so many bytes.
            unsafe { to.copy_from_nonoverlapping(std::ptr::with_exposed_provenance(at), 64) };
        } else {
            assert_eq!(self.entry("Memcpy", &[to.expose_provenance(), 64, at, 64, 2]), 0);
        }
        bytes
    }
}

/// The page of the simulation lists these rules, and each is broken here.
#[test]
fn each_rule_is_broken_by_a_script() {
    let mut script = String::new();
    for line in rules::SCRIPTS.lines().chain(["the end"]) {
        if let Some(line) = line.strip_prefix("    ") {
            script.push_str(&format!("{line}\n"));
            continue;
        }
        if !script.is_empty() {
            Script::run(&std::mem::take(&mut script));
        }
        println!("{line}");
    }
    let broken = rules::SCRIPTS.lines().filter_map(|line| line.split_once(" ! "));
    let broken: BTreeSet<_> = broken.flat_map(|(_, ids)| ids.split(' ')).map(str::to_owned).collect();
    match doubles::rules(3) {
        Some(listed) => assert_eq!(listed, broken),
        None => skip!("the page of the simulation's rules is not here"),
    }
}
