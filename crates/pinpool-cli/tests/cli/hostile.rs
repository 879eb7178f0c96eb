//! Files and names that mean harm.

use super::folder::{Folder, with_header};
use super::{fails, is_plain, limit, load, pinpool, refuses, stderr, stdout};

/// As many things as fit: for the longest header that the format allows half a gigabyte of address space is enough to
/// refuse them, and where that is not there either, it is said, and nothing aborts. (A fifth of that length,
/// without `PINPOOL_FULL=1`.)
#[test]
fn a_hundred_megabytes_of_small_things_are_refused_in_half_a_gigabyte() {
    let (longest, enough, short) = match std::env::var_os("PINPOOL_FULL") {
        Some(_) => (100_000_000, 512, 90),
        None => (20_000_000, 130, 22),
    };
    let files = Folder::new();
    let (mut text, mut number) = (String::from(r#"{"__metadata__":{"#), 0);
    while text.len() < longest - 100 {
        text += &format!("\"{number:x}\":\"\",");
        number += 1;
    }
    text.pop();
    // (One byte behind it that is nothing's.)
    let path = files.put("a.safetensors", with_header(&(text + "}}"), [0]));
    let within = |mib: u64| {
        let mut command = load([&path]);
        limit(&mut command, libc::RLIMIT_AS, mib << 20);
        command
    };
    refuses(&mut within(enough), "1 bytes at its end belong to no tensor");
    let told = "a.safetensors cannot be read without them; raise the process's memory limit";
    fails(&mut within(short), told);
}

/// A name may be anything. What is printed of it is one line, which no terminal obeys.
#[test]
fn names_cannot_steer_a_terminal_or_forge_a_line() {
    let files = Folder::new();
    let name = "a\u{1b}]0;x\u{7}\u{9b}31m\u{202e}\u{200b}\nINFO forged.bin";
    let path = files.make(name, 5000);
    let output = load([&path]).args(["-vv", "--verify", "--capacity", "8MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let told = stdout(&output);
    is_plain(&told);
    let escaped = "a\\u{1b}]0;x\\u{7}\\u{9b}31m\\u{202e}\\u{200b}\\nINFO forged.bin: 5000 bytes to";
    assert!(told.contains(escaped), "{told}");
    // The library's log has its name too.
    let log = stderr(&output);
    is_plain(&log);
    assert!(!log.lines().any(|line| line.starts_with("INFO forged")), "{log}");
    let missing = files.path().join("b\u{1b}[2J\nerror: forged");
    refuses(&mut load([missing]), "b\\u{1b}[2J error: forged: No such file");
    // A tensor's.
    let text =
        "{\"a\\u001b[2J\u{202e}\\nx\":{\"dtype\":\"\\u001b[31m\",\"shape\":[],\"data_offsets\":[0,1]}}";
    let lies = files.put("lies.safetensors", with_header(text, [0]));
    refuses(&mut load([&lies]), "tensor \"a\\u{1b}[2J\\u{202e}\\nx\" is not described");
    is_plain(&stderr(&load([&lies]).output().unwrap()));
    for args in
        [&["load", "--device", "\u{1b}[2Jx\u{202e}"][..], &["bench", "--device", "\u{9b}1m"], &["\u{1b}[31m"]]
    {
        let output = pinpool().args(args).output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).lines().count()), (Some(2), 1), "{args:?}");
        is_plain(&stderr(&output));
    }
}
