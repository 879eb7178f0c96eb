//! Answers of servers, good ones and others, and the command that shows them.

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::PrometheusBuilder;
use pinpool::telemetry::{Histogram, Sampler};
use pinpool::{Device, Pool, Unpinned};

use super::fake::{Fake, pool};
use crate::cli::top::scrape::Server;
use crate::{fails, is_plain, pinpool, reads_until, stderr};

fn once(url: &str) -> Command {
    let mut command = pinpool();
    command.args(["top", "--once", "--interval", "0.3", url]);
    command
}

/// Why an address has no answer that can be shown.
fn why(url: &str) -> String {
    Server::new(url).unwrap().fetch().unwrap_err()
}

#[test]
fn the_command_shows_what_a_servers_exporter_answers() {
    let device = Device::open("host").unwrap();
    let builder = Pool::builder(&device).name("serving").capacity(16 << 20).unpinned(Unpinned::Allow);
    let serving = builder.build().unwrap();
    let buckets = Histogram::bounds_seconds();
    let recorder = PrometheusBuilder::new().set_buckets(&buckets).unwrap().build_recorder();
    let held = serving.checkout(64 << 10).unwrap();
    metrics::with_local_recorder(&recorder, || Sampler::new(&serving).poll());
    drop(held);
    let fake = Fake::saying(recorder.handle().render());
    let Output { status, stdout, .. } = once(&fake.address.to_string()).output().unwrap();
    let shown = String::from_utf8(stdout).unwrap();
    assert!(status.success() && shown.lines().all(|line| line.chars().count() <= 110), "{shown}");
    for word in ["no alarms", "Pool serving: ", " of 16 MiB in use", "\n64.1 KiB", "\nhost:0 upload"] {
        assert!(shown.contains(word), "{word:?} is missing:\n{shown}");
    }
    let output = fails(&mut once(&fake.url("/else/where")), "no metrics at this address (status 404)");
    assert!(output.stdout.is_empty() && stderr(&output).lines().count() == 1, "{}", stderr(&output));
}

#[test]
fn a_server_without_pools_and_one_that_is_gone_are_told_apart() {
    let other = Fake::saying("# TYPE up gauge\nup 1\n".into());
    assert!(why(&other.url("/metrics")).contains("has no metrics of pinpool"));
    let going = Fake::start(|n| if n == 0 { (200, pool("p", &[])) } else { (500, String::new()) });
    let server = Server::new(&going.url("/metrics")).unwrap();
    assert!(server.fetch().is_ok() && server.fetch().unwrap_err().contains("status 500"));
    // Nothing listens there.
    for (given, full) in [
        ("127.0.0.1:1", "http://127.0.0.1:1/metrics"),
        ("http://127.0.0.1:1/", "http://127.0.0.1:1/metrics"),
        ("http://127.0.0.1:1/other/metrics", "http://127.0.0.1:1/other/metrics"),
        ("[::1]:1", "http://[::1]:1/metrics"),
    ] {
        assert_eq!(Server::new(given).unwrap().url, full);
    }
    let gone = "http://127.0.0.1:1/metrics: no process listens there: it has ended";
    fails(&mut once("127.0.0.1:1"), gone);
}

/// In a terminal, which `script` (of Debian's essential package bsdutils) makes.
#[test]
fn the_screen_says_what_is_live_and_what_is_stale() {
    static GONE: AtomicBool = AtomicBool::new(false);
    let fake = Fake::start(|_| match GONE.load(Ordering::Relaxed) {
        false => (200, pool("p", &[])),
        true => (500, String::new()),
    });
    let (url, pinpool) = (fake.url("/metrics"), env!("CARGO_BIN_EXE_pinpool"));
    // After a minute what was waited for never comes, and the text ends.
    let command = format!("stty rows 24 cols 90; timeout --foreground 60 {pinpool} top --interval 0.2 {url}");
    let mut script = Command::new("script");
    script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm-256color");
    let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut screen, mut seen) = (child.stdout.take().unwrap(), String::new());
    let mut shows = |text: &str| {
        reads_until(&mut screen, &mut seen, text);
        seen = seen.split_once(text).unwrap().1.to_owned();
    };
    // The page is printed from the screen's corner on, and there is more than fits.
    let more = "more lines: a higher terminal, or --once, shows them";
    for text in ["\u{1b}[2J", &url, "live", "waiting for the first answer", "live", "devices ", more] {
        shows(text);
    }
    GONE.store(true, Ordering::Relaxed);
    shows("STALE");
    // What was known is still there.
    shows("ALARM: stale: the server has no metrics at this address (status 500)");
    shows("devices ");
    // The command ends by a signal: that of its terminal, which ends here.
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A server that answers each request by this call. The listener's thread lives as long as the process.
fn hostile(answer: impl Fn(&mut TcpStream) -> Result<()> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 4096]);
            // (The client closes the connection once it has read enough.)
            let _ = answer(&mut stream);
        }
    });
    address
}

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n";

/// Three seconds, and the time that a busy machine takes.
#[test]
fn a_server_that_goes_on_and_on_is_not_waited_for() {
    let on_and_on = |head: &'static [u8], part: Vec<u8>, pause: u64| {
        hostile(move |stream| {
            stream.write_all(head)?;
            loop {
                stream.write_all(&part)?;
                std::thread::sleep(Duration::from_millis(pause));
            }
        })
    };
    let line = b"pinpool_memory_capacity_bytes{pool=\"a\"} 1\n";
    let header = format!("X-A: {}\r\n", "a".repeat(1000)).into_bytes();
    let since = Instant::now();
    let asked = [
        (on_and_on(HEAD, b"p".to_vec(), 300), "no whole answer within 3 s"),
        (on_and_on(b"HTTP/1.1 200 OK\r\n", header, 0), "no answer"),
        (on_and_on(b"", Vec::new(), 60_000), "no whole answer within 3 s"),
    ]
    .map(|(address, word)| std::thread::spawn(move || (why(&address), word)));
    for thread in asked {
        let (said, word) = thread.join().unwrap();
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    // On a busy machine so much may not come within three seconds: then it is asked for again.
    let large = on_and_on(HEAD, line.repeat(1000), 0);
    let told = (0..20).map(|_| why(&large)).find(|said| !said.contains("within 3 s"));
    assert!(told.as_ref().is_some_and(|said| said.contains("more than 10485760 bytes")), "{told:?}");
}

/// The place that it redirects to, the status that it gives, and bytes that are no text.
#[test]
fn why_there_is_no_answer_is_said_in_plain_characters() {
    for answer in [
        &b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\xc2\x9b31m\x1b[2J\r\nContent-Length: 0\r\n\r\n"[..],
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 \x1b[31mOWNED\x1b]0;x\x07 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n\x1f\x8b\x9b\xff\x1b",
    ] {
        is_plain(&why(&hostile(move |stream| stream.write_all(answer))));
    }
}
