//! What a header or an index costs: two and a half times its own bytes, these included.
//!
//! Allocations of the thread that reads are counted, the old and the new block of one that grows both. What is measured
//! is of a few megabytes; `tests/cli` has a hundred, under a limit of the system's.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Write;

use pinpool::Error;
use pinpool_safetensors::Checkpoint;

use super::{Folder, file, made, with_header};

thread_local! {
    /// Bytes that the thread has allocated, and the most that it had.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Counting;

fn count(bytes: isize) {
    let _ = HELD.try_with(|held| {
        let now = held.get().0 + bytes;
        held.set((now, held.get().1.max(now)));
    });
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller says.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count(len as isize);
        count(-(layout.size() as isize));
        // SAFETY: as the caller says.
        unsafe { System.realloc(at, layout, len) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The most memory that the call takes, beyond what was allocated before.
fn peak<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = HELD.get().0;
    HELD.set((start, start));
    let result = work();
    (result, (HELD.get().1 - start) as f64)
}

fn costs_little(what: &str, path: &std::path::Path, len: usize) {
    let (error, most) = peak(|| Checkpoint::open(path).map(drop).unwrap_err());
    let ratio = most / len as f64;
    assert!(ratio <= 2.5, "{what}: {ratio:.2} times its bytes");
    // An error text is short enough to read.
    assert!(error.to_string().len() < 4000, "{what}");
    match error {
        Error::Malformed { tensor, .. } => assert!(tensor.is_none_or(|name| name.chars().count() <= 200)),
        error => assert!(matches!(error, Error::Read { .. }), "{what}: {error}"),
    }
}

/// Bytes of what is read. Beside them there may be a list of an index's files, of at most half a megabyte.
const BYTES: usize = 4 << 20;

/// About that many bytes, of numbered pieces.
fn filled(front: &str, back: &str, mut piece: impl FnMut(&mut String, usize)) -> String {
    let mut text = String::from(front);
    for number in 0.. {
        piece(&mut text, number);
        if text.len() >= BYTES {
            break;
        }
        text.push(',');
    }
    text + back
}

#[test]
fn a_header_that_is_refused_costs_little_more_than_its_bytes() {
    let none = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let escaped = "abc\\n".repeat(BYTES / 5);
    let axes = format!(r#"{{"dtype":"U8","shape":[{}0],"data_offsets":[0,0]}}"#, "1,".repeat(63));
    let tensor = |fields: &str| format!(r#"{{"a":{{{fields}}}}}"#);
    let headers = [
        (
            "pairs of metadata",
            filled(r#"{"__metadata__":{"#, "}}", |t, n| write!(t, "\"{n:x}\":\"\"").unwrap()),
        ),
        ("tensors of many axes", filled("{", "}", |t, n| write!(t, "\"{n:x}\":{axes}").unwrap())),
        (
            "tensors in the wrong order",
            filled("{", "}", |t, n| {
                let from = BYTES - n;
                write!(t, r#""{n}\n":{{"dtype":"U8","shape":[1],"data_offsets":[{from},{}]}}"#, from + 1)
                    .unwrap();
            }),
        ),
        ("a type", tensor(&format!(r#""dtype":"{escaped}","shape":[],"data_offsets":[0,0]"#))),
        ("a long number", tensor(&format!(r#""dtype":"U8","data_offsets":[{}]"#, "1".repeat(BYTES)))),
        ("brackets in a tensor", format!(r#"{{"a":{}"#, "[".repeat(BYTES))),
        ("a name with half of a pair", format!(r#"{{"{escaped}\\ud800":{none}}}"#)),
    ];
    let folder = Folder::new();
    for (what, header) in headers {
        // A byte that belongs to nothing, or its lack, where nothing else is wrong.
        costs_little(what, &folder.put("a.safetensors", with_header(&header, [0])), header.len());
    }
    let axes = none.replace("[0]", "[0,1,1,1]");
    for (name, value) in [("", none), ("", &axes), ("\\n", &axes)] {
        let header = filled("{", "}", |t, n| write!(t, "\"{n:x}{name}\":{value}").unwrap());
        let path = folder.put("a.safetensors", with_header(&header, []));
        let (checkpoint, most) = peak(|| Checkpoint::open(&path).unwrap());
        let ratio = most / header.len() as f64;
        assert!(ratio <= 2.5 && checkpoint.tensors().next().is_some(), "{ratio:.2} times its bytes");
    }
}

#[test]
fn an_index_that_is_refused_costs_little_more_than_its_bytes() {
    let folder = Folder::new();
    folder.put("1", file(&[made("a", "U8", &[3], 1)]));
    let escaped = "abc\\n".repeat(BYTES / 5);
    let map = |piece: fn(&mut String, usize)| filled(r#"{"weight_map":{"#, "}}", piece);
    for (what, index) in [
        ("tensors of one file", map(|t, n| write!(t, "\"{n:x}\":\"1\"").unwrap())),
        ("files", map(|t, n| write!(t, "\"{n:x}\":\"{n:x}\"").unwrap())),
        ("a file", format!(r#"{{"weight_map":{{"a":"{escaped}"}}}}"#)),
        ("brackets", format!(r#"{{"metadata":{}"#, "[".repeat(BYTES))),
    ] {
        costs_little(what, &folder.put("model.safetensors.index.json", &index), index.len());
    }
}
