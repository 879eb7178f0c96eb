//! `pinpool top` against the example's server, fabricated ones, and none.

use std::io::{Read, Write};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;

use crate::fake::{Fake, pool};
use crate::{PATIENCE, programs, server};

const PINPOOL: &str = env!("CARGO_BIN_EXE_pinpool");

fn once(url: &str) -> Output {
    programs::run(Command::new(PINPOOL).args(["top", "--once", "--interval", "0.3", url]))
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What it fails with, in one line.
fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(text.lines().count() == 1 && output.stdout.is_empty(), "{text}");
    text
}

#[test]
fn it_shows_the_servers_pool() {
    let text = text(&once(&server().url("/metrics")));
    for word in [
        "Pool serving: ",
        " of 16.0 MiB in use",
        "# checked out",
        "requests waiting now",
        "64.1 KiB",
        "host:0 upload",
        "GB/s",
        "host:0 stream ",
    ] {
        assert!(text.contains(word), "{word:?} is missing:\n{text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 110, "{line}");
    }
}

#[test]
fn numbers_are_those_of_the_metrics() {
    let fake = Fake::start(|n| {
        let bad = format!("pinpool_timeouts_total{{pool=\"p\"}} {}", 5 + 2 * n);
        (200, pool("p", &[&bad, "pinpool_memory_unlocked_bytes{pool=\"p\"} 4096"]))
    });
    let text = text(&once(&fake.address.to_string()));
    for line in [
        "ALARM: p: waits for memory given up in the last 1 s: 2",
        "warning: p: 4.0 KiB are not page-locked: raise the memlock limit, pinpool doctor says how",
        "Pool p: 80.0 MiB of 100 MiB in use (80%)",
        "# checked out               50.0 MiB           50%",
        "64.1 KiB    3     5                0          -",
        "cuda:0 stream 7                12  30.0 MiB",
    ] {
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (line, text) = (squeezed(line.trim_end_matches('-')), squeezed(&text));
        assert!(text.contains(&line), "{line:?} is missing:\n{text}");
    }
    // Half of 78 columns out, three tenths in flight, the rest free.
    let bar = text.lines().find(|line| line.starts_with('[')).unwrap();
    assert_eq!(bar, format!("[{}{}{}]", "#".repeat(39), ">".repeat(23), ".".repeat(16)));
}

#[test]
fn a_process_that_is_gone_is_said_to_be_gone() {
    let address = Fake::saying(String::new()).address;
    // The listener's thread ends when it has looked.
    let said = loop {
        let said = complaint(&once(&address.to_string()));
        if !said.contains("no metrics of pinpool") && !said.contains("no answer:") {
            break said;
        }
    };
    assert!(
        said.contains(&format!("http://{address}/metrics: nobody listens there: the process is gone")),
        "{said}"
    );
}

#[test]
fn a_server_without_pools_is_said_to_have_none() {
    let other = Fake::saying("# TYPE up gauge\nup 1\n".into());
    assert!(complaint(&once(&other.url("/metrics"))).contains("has no metrics of pinpool"));
    assert!(complaint(&once(&other.url("/else/where"))).contains("status 404"));
    let going = Fake::start(|n| if n == 0 { (200, pool("p", &[])) } else { (500, String::new()) });
    assert!(complaint(&once(&going.url("/metrics"))).contains("status 500"));
}

#[test]
fn what_cannot_be_obeyed_is_refused() {
    for args in
        [&["top"][..], &["top", "--once", "https://host"], &["top", "--once", "--interval", "0", "h:1"]]
    {
        let output = programs::run(Command::new(PINPOOL).args(args));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    }
}

/// In a terminal that `script` (of Debian's essential package bsdutils) makes, from the first picture to `q`.
#[test]
fn the_screen_is_drawn_and_put_back_in_order() {
    let command = format!("stty rows 40 cols 100; {PINPOOL} top --interval 0.2 {}", server().url("/metrics"));
    let mut script = Command::new("script");
    script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm-256color");
    let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut keys, mut screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let (sender, pieces) = channel();
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = screen.read(&mut piece) {
            if sender.send(String::from_utf8_lossy(&piece[..n]).into_owned()).is_err() {
                return;
            }
        }
    });
    let mut seen = String::new();
    while !seen.contains("Pool serving") {
        seen += &pieces.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("{e}: {seen:?}"));
    }
    keys.write_all(b"q").unwrap();
    while let Ok(piece) = pieces.recv_timeout(PATIENCE) {
        seen += &piece;
    }
    assert!(child.wait().unwrap().success(), "{seen:?}");
    let (on, off) = ("\u{1b}[?1049h", "\u{1b}[?1049l");
    assert!(seen.contains(on) && seen.contains("live"), "{seen:?}");
    assert!(seen.rfind(off) > seen.rfind(on), "the other screen is left: {seen:?}");
}
