//! What `pinpool top` makes of answers in the course of minutes, and of texts that are no answers.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::fake;
use crate::cli::top::scrape::Scrape;
use crate::cli::top::view::History;
use crate::is_plain;

#[test]
fn samples_are_read() {
    let text = "# HELP a text\n# TYPE a gauge\npinpool_a 1\nother{pool=\"p\"} 3\n\
                pinpool_b{pool=\"q\\\"\\\\}, \",job=\"x\",le=\"1\"} 2.5e3 1700000000\n\npinpool_c{} +Inf\n\
                pinpool_b{le=\"1\",pool=\"q\\\"\\\\}, \",job=\"y\"} 1\npinpool_b{pool=\"a\",le=\"2\"} 4\n\
                pinpool_broken{x=\"1\nnone\n";
    let scrape = Scrape::parse(text);
    assert_eq!(scrape.sum("pinpool_a", "", None), 1.0);
    let name = "q\"\\}, ";
    assert_eq!(scrape.get("pinpool_b", name, "1"), Some(2501.0), "{scrape:?}");
    assert_eq!(scrape.sum("pinpool_b", name, None), 2501.0);
    assert_eq!(scrape.sum("pinpool_b", "a", Some("2")), 4.0);
    assert_eq!(scrape.sum("pinpool_c", "", None), f64::INFINITY);
    let parts = ["a", "b", "c", "broken"].map(|name| scrape.all(&format!("pinpool_{name}")).len());
    assert_eq!((parts, scrape.len(), scrape.all("other").len()), ([1, 2, 1, 0], 5, 0), "{scrape:?}");
}

proptest! {
    #[test]
    fn nothing_panics(text in ".{0,200}", shaped in "[a-c]{0,2}\\{?([xy]=\"?[^\n]{0,4}\"?,?){0,3}\\}? ?[0-9.eE+-]{0,4}") {
        Scrape::parse(&text);
        Scrape::parse(&shaped);
        Scrape::parse(&format!("pinpool_{shaped}"));
    }
}

/// What was heard, on a clock of the test's.
struct Heard(History, Instant);

impl Heard {
    fn new() -> Self {
        Self(History::default(), Instant::now())
    }

    fn at(&self, second: u64) -> Instant {
        self.1 + Duration::from_secs(second)
    }

    /// An answer: a pool of 100 MiB, of which 20 MiB are free, but for these lines in place of its own.
    fn add(&mut self, second: u64, lines: &[&str]) {
        self.hear(second, &fake::pool("p", lines));
    }

    fn hear(&mut self, second: u64, text: &str) {
        let at = self.at(second);
        self.0.add(at, Ok(Scrape::parse(text)));
    }

    fn page(&self, second: u64) -> String {
        self.0.page(self.at(second))
    }

    /// The lines before the first heading.
    fn notes(&self, second: u64) -> Vec<String> {
        self.page(second).lines().take_while(|line| !line.is_empty()).map(str::to_owned).collect()
    }
}

/// The text about a server that gives this answer.
fn shown(answer: &str) -> String {
    let mut heard = Heard::new();
    (0..2).for_each(|second| heard.hear(second, answer));
    heard.page(1)
}

#[test]
fn rates_and_quantiles_are_of_what_came_lately_and_survive_a_restart() {
    let mut heard = Heard::new();
    // Of those that waited, some were fast.
    let mut add = |second, count: u32, fast: u32, all: u32| {
        let buckets = [("0.001", fast), ("+Inf", all)];
        let [fast, all] = buckets.map(|(le, n)| format!("pinpool_w_bucket{{pool=\"p\",le=\"{le}\"}} {n}"));
        heard.add(second, &[&format!("pinpool_c_total{{pool=\"p\"}} {count}"), &fast, &all]);
        let quantile = |q| heard.0.quantile(q, "pinpool_w", "p");
        (heard.0.rate("pinpool_c_total", "p", None), [quantile(0.1), quantile(0.5)])
    };
    assert_eq!(add(0, 1000, 1000, 1000), (None, [Some(0.001); 2]));
    add(5, 1000, 1000, 1000);
    // Nine of ten new ones are long.
    assert_eq!(add(10, 1100, 1001, 1010), (Some(20.0), [Some(0.001), Some(f64::INFINITY)]));
    assert_eq!(add(15, 50, 1001, 1010).0, Some(10.0), "50 since it started again");
    assert_eq!(heard.0.quantile(0.5, "pinpool_w", "q"), None);
}

/// A server that is gone leaves stale numbers, and so does a sampler that has ended.
#[test]
fn what_nobody_looks_at_is_stale() {
    let mut heard = Heard::new();
    let gone = || Err("no process listens there".into());
    heard.0.add(heard.1, gone());
    assert_eq!(heard.notes(0), ["ALARM: no process listens there"]);
    for (second, stamp) in [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (20, 4), (65, 4)] {
        heard.add(second, &[&format!("pinpool_sampled_timestamp_seconds{{pool=\"p\"}} {stamp}")]);
        let stale = "ALARM: p: stale, not sampled in the last 61 s: the sampler has ended";
        assert_eq!(heard.notes(second), [if second < 60 { "no alarms" } else { stale }]);
    }
    heard.add(66, &[]);
    heard.0.add(heard.at(66), gone());
    let stale = "ALARM: stale: no process listens there; what is shown is 7 s old";
    assert_eq!(heard.notes(73)[0], stale);
}

/// An operator looks for what is lost or stuck first; a pool may have a hundred size classes.
#[test]
fn devices_come_first_and_ten_classes_at_most() {
    let mut heard = Heard::new();
    // Of the larger classes less is out, and more bytes.
    let class = |n: u32, checkouts: u32| {
        let labels = format!("{{pool=\"p\",stride=\"{}\"}}", n << 10);
        format!(
            "pinpool_class_out_segments{labels} {}\npinpool_class_free_segments{labels} 2\n\
             pinpool_class_checkouts_total{labels} {checkouts}\n",
            if n == 1 { 9000 } else { 200 - n }
        )
    };
    for (second, checkouts) in [(0, 0), (10, 100)] {
        let classes: String = (1..=70).map(|n| class(n, checkouts)).collect();
        heard.hear(second, &(fake::pool("p", &[]) + &classes));
    }
    let text = heard.page(10);
    assert!(text.find("devices ").unwrap() < text.find("Pool p: ").unwrap(), "{text}");
    let classes = text.lines().skip_while(|line| !line.starts_with("classes ")).skip(1);
    let rows: Vec<Vec<&str>> = classes
        .take_while(|line| !line.is_empty())
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    // Those of which most bytes are out, the largest share first. (The pool has two classes of its own.)
    let names: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(names[..4], ["larger", "70 KiB", "69 KiB", "1 KiB"], "{text}");
    assert_eq!(names[10..], ["warning: 62 more classes are not shown"], "{text}");
    assert_eq!(rows[1], ["70 KiB", "130", "2", "0", "10.0/s"], "{text}");
}

/// The sampler sends zeros for a pool that has ended, and a recorder keeps those for good.
#[test]
fn a_pool_that_has_ended_is_not_shown() {
    let mut heard = Heard::new();
    for second in 0..30 {
        let (capacity, stamp) = if second < 5 { (4096, second + 1) } else { (0, 0) };
        let other = format!("pinpool_memory_capacity_bytes{{pool=\"q\"}} {capacity}");
        let sampled = format!("pinpool_sampled_timestamp_seconds{{pool=\"q\"}} {stamp}");
        let own = format!("pinpool_sampled_timestamp_seconds{{pool=\"p\"}} {}", second + 1);
        heard.add(second, &[&other, &sampled, &own]);
        let text = heard.page(second);
        assert!(text.contains("Pool p: ") && text.contains("Pool q: ") == (second < 5), "{text}");
    }
    assert_eq!(heard.notes(30), ["no alarms"]);
}

#[test]
fn each_condition_is_said() {
    for (metric, words) in fake::CONDITIONS.into_iter().zip([
        ["15 MiB are quarantined", "nearly full, 95%"],
        ["out for too long: 3 (0 bytes)", "pinpool::pool::stuck"],
        ["4 KiB are not pinned", "memlock"],
        ["cuda:0 is lost", "restart"],
        ["cuda:0: streams that get nothing done: 2", "hangs"],
        ["waits for memory timed out", "in the last 1 s: 4"],
        ["checkouts refused in the last 1 s: 3", "queue full"],
        ["pinning ended early", "doctor"],
        ["requests that had to wait", "in the last 1 s: 5"],
    ]) {
        let mut heard = Heard::new();
        heard.add(0, &[]);
        heard.add(1, &[metric]);
        let found = heard.page(1);
        assert!(words.iter().all(|word| found.contains(word)), "{metric}:\n{found}");
        assert!(!found.contains("no alarms"), "{metric}:\n{found}");
    }
}

/// Names steer no terminal, forge no line and have an end; and numbers may be anything.
#[test]
fn labels_cannot_steer_a_terminal_and_have_an_end() {
    // The last is the longest name of a pool, with its number.
    let name = format!("{}...#{}", "W".repeat(100), u64::MAX);
    for (raw, label) in [
        (
            "\u{1b}[2Jx\\nALARM: forged\u{202e}\u{9b}31m\u{200b}",
            "\\u{1b}[2Jx\\nALARM: forged\\u{202e}\\u{9b}31m\\u{200b}",
        ),
        (&*"W".repeat(9_000_000), &*("W".repeat(124) + "...")),
        (&*name, &*name),
    ] {
        let text = shown(&format!(
            "pinpool_memory_capacity_bytes{{pool=\"{raw}\"}} 1\npinpool_device_lost{{device=\"\u{9b}31mevil\"}} 1\n\
             pinpool_memory_capacity_bytes{{pool=\"b\"}} NaN\npinpool_memory_bytes{{pool=\"b\",state=\"free\"}} -1e308\n\
             pinpool_memory_bytes{{pool=\"b\",state=\"cut\"}} 1e308\npinpool_memory_bytes{{pool=\"b\",state=\"in_flight\"}} Inf\n\
             pinpool_wait_seconds_bucket{{pool=\"b\",le=\"NaN\"}} NaN\n"
        ));
        assert!(text.contains(&format!("\nPool {label}: 0 bytes of 1 byte in use (0%)\n")), "{text}");
        assert!(text.len() < 20_000, "{} bytes", text.len());
        assert!(!text.lines().any(|line| line.starts_with("ALARM: forged")), "{text}");
        is_plain(&text);
    }
}

/// Seconds of a processor that this thread has had.
fn cpu_seconds() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to the struct.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    time.tv_sec
}

/// Tens of thousands of series are read, and as many as a screen can use are shown.
#[test]
fn the_work_grows_with_the_answer_and_no_faster() {
    let pools = (0..10_000).map(|n| {
        format!(
            "pinpool_memory_capacity_bytes{{pool=\"{n:x}\"}} 1\npinpool_memory_bytes{{pool=\"{n:x}\"}} 1\n"
        )
    });
    let series = |name: &str, part: &str| -> String {
        let lines = (0..30_000).map(|n| format!("pinpool_{name}{{pool=\"p\",{part}=\"{n}\"}} 1\n"));
        fake::pool("p", &[]) + &lines.collect::<String>()
    };
    for (what, body, word) in [
        ("pools", pools.collect(), "warning: 9950 more pools are not shown"),
        ("buckets", series("wait_seconds_bucket", "le"), "99% of the waits"),
        ("classes", series("class_out_segments", "stride"), "29992 more"),
    ] {
        let since = cpu_seconds();
        let text = shown(&body);
        // (A tenth of a second for each of two answers.)
        assert!(cpu_seconds() - since < 5, "{what} take {} s", cpu_seconds() - since);
        assert!(text.contains(word) && text.len() < 1 << 20, "{what}:\n{}", &text[..text.len().min(3000)]);
    }
}
