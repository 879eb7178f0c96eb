//! `pinpool top` against the example's server, fabricated ones, and none.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::fake::{Fake, pool};
use super::{PATIENCE, programs, server};

const PINPOOL: &str = env!("CARGO_BIN_EXE_pinpool");

fn once(url: &str) -> Output {
    programs::run(Command::new(PINPOOL).args(["top", "--once", "--interval", "0.3", url]))
}

/// The text about a server that always gives this answer.
fn shown(answer: &str) -> String {
    text(&once(&Fake::saying(answer.to_owned()).url("/metrics")))
}

/// A command line that cannot be obeyed.
fn refused(args: &[&str]) {
    let output = programs::run(Command::new(PINPOOL).args(args));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
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
    let since = Instant::now();
    // (On a busy machine its load takes a while to use everything.)
    let text = loop {
        let text = text(&once(&server().url("/metrics")));
        if text.contains("64.1 KiB") || since.elapsed() > PATIENCE {
            break text;
        }
    };
    for word in [
        "Pool serving: ",
        " of 16 MiB in use",
        "checked out",
        "requests waiting now",
        "64.1 KiB",
        "host:0 upload",
        "GB/s",
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
        (200, pool("p", &[&bad, "pinpool_memory_unpinned_bytes{pool=\"p\"} 4096"]))
    });
    let text = text(&once(&fake.address.to_string()));
    for line in [
        "ALARM: p: waits for memory timed out in the last 1 s: 2",
        "warning: p: 4 KiB are not pinned: raise the memlock limit, pinpool doctor says how",
        "Pool p: 80 MiB of 100 MiB in use (80%)",
        "checked out               50 MiB           50%",
        "64.1 KiB    3     5                0          -",
    ] {
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (line, text) = (squeezed(line.trim_end_matches('-')), squeezed(&text));
        assert!(text.contains(&line), "{line:?} is missing:\n{text}");
    }
}

#[test]
fn a_process_that_is_gone_is_said_to_be_gone() {
    let address = Fake::saying(String::new()).address;
    // The listener's thread ends when it has seen the flag.
    let said = loop {
        let said = complaint(&once(&address.to_string()));
        if !said.contains("no metrics of pinpool") && !said.contains("no answer:") {
            break said;
        }
    };
    assert!(
        said.contains(&format!("http://{address}/metrics: no process listens there: it has ended")),
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
    refused(&["top"]);
    refused(&["top", "--once", "--interval", "0", "h:1"]);
}

#[test]
fn addresses_are_completed() {
    // Nothing listens there.
    for (given, full) in [
        ("127.0.0.1:1", "http://127.0.0.1:1/metrics"),
        ("http://127.0.0.1:1/", "http://127.0.0.1:1/metrics"),
        ("http://127.0.0.1:1/other/metrics", "http://127.0.0.1:1/other/metrics"),
        ("[::1]:1", "http://[::1]:1/metrics"),
    ] {
        let said = complaint(&once(given));
        assert!(said.starts_with(&format!("error: {full}: no ")), "{given}: {said}");
    }
    for wrong in ["", "https://host", "http://", "/metrics", "ftp://x"] {
        refused(&["top", "--once", wrong]);
    }
}

#[test]
fn each_condition_is_said() {
    for (metric, words) in [
        (
            "pinpool_memory_bytes{pool=\"p\",state=\"quarantined\"} 15728640",
            ["15 MiB are quarantined", "nearly full, 95%"],
        ),
        ("pinpool_stuck_buffers{pool=\"p\"} 3", ["out for too long: 3 (0 bytes)", "pinpool::pool::stuck"]),
        ("pinpool_memory_unpinned_bytes{pool=\"p\"} 4096", ["4 KiB are not pinned", "memlock"]),
        ("pinpool_device_lost{device=\"cuda:0\"} 1", ["cuda:0 is lost", "restart"]),
        (
            "pinpool_device_stuck_streams{device=\"cuda:0\"} 2",
            ["cuda:0: streams that get nothing done: 2", "hangs"],
        ),
        ("pinpool_timeouts_total{pool=\"p\"} 4", ["waits for memory timed out", "in the last 1 s: 4"]),
        (
            "pinpool_refused_total{pool=\"p\",reason=\"queue_full\"} 3",
            ["checkouts refused in the last 1 s: 3", "queue full"],
        ),
        ("pinpool_waits_total{pool=\"p\"} 5", ["requests that had to wait", "in the last 1 s: 5"]),
        ("pinpool_growth_failures_total{pool=\"p\"} 1", ["pinning ended early", "doctor"]),
    ] {
        let fake = Fake::start(move |n| (200, if n == 0 { pool("p", &[]) } else { pool("p", &[metric]) }));
        let found = text(&once(&fake.url("/metrics")));
        assert!(words.iter().all(|word| found.contains(word)), "{metric}:\n{found}");
        assert!(!found.contains("no alarms"), "{metric}:\n{found}");
    }
}

#[test]
fn tables_are_aligned_and_what_is_bad_comes_first() {
    let bad = [
        "pinpool_device_lost{device=\"a\"} 1",
        "pinpool_device_errors_total{device=\"a\"} 100",
        "pinpool_memory_unpinned_bytes{pool=\"p\"} 1",
    ];
    let text = shown(&pool("p", &bad));
    let table = "\n\
                 devices                                  speed           of peak    99% of flights            errors\n\
                 a upload                             0.00 GB/s                 -              none               100\n";
    assert!(text.contains(table), "{text}");
    let first = "ALARM: a is lost: restart the process\nwarning: p: 1 byte are not pinned";
    assert!(text.starts_with(first), "{text}");
}

#[test]
fn labels_cannot_steer_a_terminal_and_have_an_end() {
    // The last is the longest name of a pool, with its number.
    let name = format!("{}...#{}", "W".repeat(100), u64::MAX);
    for (raw, label) in [
        ("\u{1b}[2Jx\\n\u{202e}\u{9b}31m\u{200b}", "\\u{1b}[2Jx\\n\\u{202e}\\u{9b}31m\\u{200b}"),
        (&*"W".repeat(9_000_000), &*("W".repeat(124) + "...")),
        (&*name, &*name),
    ] {
        let text = shown(&format!("pinpool_memory_capacity_bytes{{pool=\"{raw}\"}} 1\n"));
        assert!(text.contains(&format!("\nPool {label}: 0 bytes of 1 byte in use (0%)\n")), "{text}");
        assert!(text.len() < 20_000, "{} bytes", text.len());
    }
}

/// `pinpool top` in a terminal, which `script` (of Debian's essential package bsdutils) makes.
struct Terminal {
    child: Child,
    /// Held open: the terminal ends with it.
    _keys: ChildStdin,
    pieces: Receiver<String>,
    /// What the terminal was sent, as far as the test has read it.
    seen: String,
}

impl Terminal {
    fn start(size: &str, interval: &str, url: &str) -> Self {
        let command = format!("stty {size}; {PINPOOL} top --interval {interval} {url}");
        let mut script = Command::new("script");
        script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm-256color");
        let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (keys, mut screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, pieces) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut piece) {
                if sender.send(String::from_utf8_lossy(&piece[..n]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { child, _keys: keys, pieces, seen: String::new() }
    }

    /// Waits until the terminal was sent this text.
    fn shows(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let piece = self.pieces.recv_timeout(PATIENCE);
            self.seen += &piece.unwrap_or_else(|e| panic!("{e}: no {text:?} in {:?}", self.seen));
        }
    }
}

impl Drop for Terminal {
    /// The command ends by a signal: that of its terminal, which ends here.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_screen_says_what_is_live_and_what_is_stale() {
    static GONE: AtomicBool = AtomicBool::new(false);
    let fake = Fake::start(|_| match GONE.load(Ordering::Relaxed) {
        false => (200, pool("p", &[])),
        true => (500, String::new()),
    });
    let mut terminal = Terminal::start("rows 24 cols 90", "0.2", &fake.url("/metrics"));
    terminal.shows("waiting for the first answer");
    terminal.shows(&fake.url("/metrics"));
    // The page is printed from the screen's corner on.
    terminal.shows("\u{1b}[2J");
    terminal.shows("live");
    terminal.shows("devices ");
    // There is more than fits.
    terminal.shows("more lines: a higher terminal, or --once, shows them");
    terminal.seen.clear();
    GONE.store(true, Ordering::Relaxed);
    terminal.shows("STALE");
    terminal.shows("ALARM: stale: the server has no metrics at this address (status 500)");
    // What was known is still there.
    terminal.shows("devices ");
}

/// A server that answers each request by this call. The listener's thread lives as long as the process.
fn hostile(answer: impl Fn(&mut TcpStream, u16) -> std::io::Result<()> + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = std::sync::Arc::new(answer);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let answer = answer.clone();
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                // (The client closes the connection once it has read enough.)
                let _ = answer(&mut stream, port);
            });
        }
    });
    port
}

fn head(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
}

fn is_plain(text: &str) {
    let bad = |c: char| c != '\n' && (c.is_control() || "\u{200b}\u{202e}".contains(c));
    assert!(!text.contains(bad), "{text:?}");
}

/// As many series as fit into an answer are read, and as many as a screen can use are shown.
#[test]
fn the_work_grows_with_the_answer_and_no_faster() {
    let pools: String = (0..20_000)
        .map(|n| format!("pinpool_memory_capacity_bytes{{pool=\"{n:x}\"}} 1\npinpool_memory_bytes{{pool=\"{n:x}\"}} 1\n"))
        .collect();
    let one = "pinpool_memory_capacity_bytes{pool=\"a\"} 1\npinpool_device_lost{device=\"d\"} 0\n";
    let series = |name: &str, owner: &str, part: &str| {
        (0..60_000)
            .fold(one.to_owned(), |text, n| text + &format!("pinpool_{name}{{{owner},{part}=\"{n}\"}} 1\n"))
    };
    for (what, body, word) in [
        ("pools", pools, "warning: 19950 more pools are not shown"),
        ("buckets", series("wait_seconds_bucket", "pool=\"a\"", "le"), "99% of the waits"),
        ("classes", series("class_out_segments", "pool=\"a\"", "stride"), "59990 more"),
    ] {
        let fake = Fake::saying(body);
        let begun = Instant::now();
        let (since, output) = loop {
            let since = Instant::now();
            let output = once(&fake.url("/metrics"));
            // On a busy machine a fetch may take longer than the command waits for it.
            let late = String::from_utf8_lossy(&output.stderr).contains("no whole answer within");
            if !late || begun.elapsed() > PATIENCE {
                break (since, output);
            }
        };
        let text = text(&output);
        // (A fifth of a second for each of two fetches, and an interval, without other load on the machine.)
        assert!(since.elapsed() < Duration::from_secs(15), "{what}: {:?}", since.elapsed());
        assert!(text.contains(word) && text.len() < 1 << 20, "{what}:\n{}", &text[..text.len().min(3000)]);
    }
}

/// Three seconds, and the time that a busy machine takes.
#[test]
fn a_server_that_goes_on_and_on_is_not_waited_for() {
    let line = "pinpool_memory_capacity_bytes{pool=\"a\"} 1\n";
    let drip = hostile(|stream, _| {
        head(stream)?;
        loop {
            stream.write_all(b"p")?;
            std::thread::sleep(Duration::from_millis(300));
        }
    });
    let endless = hostile(move |stream, _| {
        head(stream)?;
        let many = line.repeat(1000);
        loop {
            stream.write_all(many.as_bytes())?;
        }
    });
    let headers = hostile(|stream, _| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n")?;
        loop {
            stream.write_all(format!("X-A: {}\r\n", "a".repeat(1000)).as_bytes())?;
        }
    });
    let silent = hostile(|_, _| {
        std::thread::sleep(Duration::from_secs(60));
        Ok(())
    });
    for (port, word) in [
        (drip, "no whole answer within 3 s"),
        (endless, "more than 10485760 bytes"),
        (headers, "no answer"),
        (silent, "no whole answer within 3 s"),
    ] {
        let since = Instant::now();
        let said = complaint(&once(&format!("127.0.0.1:{port}")));
        assert!(said.contains(word), "{word}: {said}");
        assert!(since.elapsed() < Duration::from_secs(10), "{word}: {:?}", since.elapsed());
    }
}

#[test]
fn what_a_server_says_cannot_steer_a_terminal() {
    let labels = "pinpool_memory_capacity_bytes{pool=\"\u{202e}txt\u{9b}31m\u{200b}\u{1b}[2J\\nALARM: forged\"} 5\n\
                  pinpool_memory_capacity_bytes{pool=\"b\"} NaN\npinpool_memory_bytes{pool=\"b\",state=\"free\"} -1e308\n\
                  pinpool_memory_bytes{pool=\"b\",state=\"cut\"} 1e308\npinpool_memory_bytes{pool=\"b\",state=\"in_flight\"} Inf\n\
                  pinpool_wait_seconds_bucket{pool=\"b\",le=\"NaN\"} NaN\npinpool_device_lost{device=\"\u{9b}31mevil\"} 1\n";
    let shown = shown(labels);
    is_plain(&shown);
    assert!(shown.contains("Pool \\u{202e}txt\\u{9b}31m\\u{200b}\\u{1b}[2J\\nALARM: forged: "), "{shown}");
    assert!(!shown.lines().any(|line| line.starts_with("ALARM: forged")), "{shown}");
    // The place that it redirects to, and the status that it gives.
    let elsewhere = hostile(|stream, port| {
        let place = b"http://127.0.0.1:".iter().copied().chain(port.to_string().into_bytes());
        let place: Vec<u8> = place.chain(*b"/\xc2\x9b31m\x1b[2J").collect();
        stream.write_all(
            &[b"HTTP/1.1 302 Found\r\nLocation: ", &place[..], b"\r\nContent-Length: 0\r\n\r\n"].concat(),
        )
    });
    let file = hostile(|stream, _| {
        stream.write_all(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n")
    });
    let state = hostile(|stream, _| stream.write_all(b"HTTP/1.1 \x1b[31mOWNED\x1b]0;x\x07 OK\r\n\r\n"));
    let bytes = hostile(|stream, _| {
        stream.write_all(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n\x1f\x8b\x9b\xff\x1b",
        )
    });
    for port in [elsewhere, file, state, bytes] {
        is_plain(&complaint(&once(&format!("127.0.0.1:{port}"))));
    }
}
