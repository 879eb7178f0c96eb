//! What `pinpool top` makes of answers in the course of minutes, and of texts that are no answers. Its files are compiled
//! a second time here, since the command would take those minutes.

#[allow(dead_code, reason = "no server is asked here")]
#[path = "../../src/cli/top/scrape.rs"]
mod scrape;
#[path = "../../src/cli/top/view.rs"]
mod view;

use std::time::{Duration, Instant};

use proptest::prelude::*;

use scrape::Scrape;
use view::History;

fn parsed(text: &str) -> Scrape {
    Scrape::parse(text)
}

#[test]
fn samples_are_read() {
    let text = "# HELP a text\n# TYPE a gauge\npinpool_a 1\nother{pool=\"p\"} 3\n\
                pinpool_b{pool=\"q\\\"\\\\}, \",job=\"x\",le=\"1\"} 2.5e3 1700000000\n\npinpool_c{} +Inf\n\
                pinpool_b{le=\"1\",pool=\"q\\\"\\\\}, \",job=\"y\"} 1\npinpool_b{pool=\"a\",le=\"2\"} 4\n\
                pinpool_broken{x=\"1\nnone\n";
    let scrape = parsed(text);
    assert_eq!(scrape.sum("pinpool_a", "", None), 1.0);
    let name = "q\"\\}, ";
    assert_eq!(scrape.get("pinpool_b", name, "1"), Some(2501.0), "{scrape:?}");
    assert_eq!(scrape.sum("pinpool_b", name, None), 2501.0);
    assert_eq!(scrape.get("pinpool_b", name, "2"), None);
    assert_eq!(scrape.sum("pinpool_b", "a", Some("2")), 4.0);
    assert_eq!(scrape.sum("pinpool_c", "", None), f64::INFINITY);
    let parts = ["a", "b", "c", "broken"].map(|name| scrape.all(&format!("pinpool_{name}")).len());
    assert_eq!((parts, scrape.len()), ([1, 2, 1, 0], 5), "{scrape:?}");
    assert!(scrape.of("pinpool_b", "b").next().is_none() && scrape.all("other").is_empty());
}

proptest! {
    #[test]
    fn nothing_panics(text in ".{0,200}", shaped in "[a-c]{0,2}\\{?([xy]=\"?[^\n]{0,4}\"?,?){0,3}\\}? ?[0-9.eE+-]{0,4}") {
        parsed(&text);
        parsed(&shaped);
        parsed(&format!("pinpool_{shaped}"));
    }
}

/// A pool of 100 MiB, of which 20 MiB are free.
const POOL: &str = "pinpool_memory_capacity_bytes{pool=\"p\"} 104857600\n\
                    pinpool_memory_bytes{pool=\"p\",state=\"free\"} 20971520\n\
                    pinpool_memory_bytes{pool=\"p\",state=\"checked_out\"} 83886080\n";

/// An answer with one more line, some seconds after `start`.
fn add(history: &mut History, start: Instant, second: u64, more: &str) {
    history.add(start + Duration::from_secs(second), Ok(parsed(&format!("{POOL}{more}\n"))));
}

/// The lines before the first heading.
fn notes(history: &History, now: Instant) -> Vec<String> {
    let text = history.page(now);
    text.lines().take_while(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn rates_are_of_the_last_seconds_and_survive_a_restart() {
    let (mut history, start) = (History::default(), Instant::now());
    for (second, count) in [(0, 1000), (5, 1000), (10, 1100)] {
        add(&mut history, start, second, &format!("pinpool_c_total{{pool=\"p\"}} {count}"));
    }
    assert_eq!(history.rate("pinpool_c_total", "p", None), Some(20.0));
    add(&mut history, start, 15, "pinpool_c_total{pool=\"p\"} 50");
    assert_eq!(history.rate("pinpool_c_total", "p", None), Some(10.0), "50 since it started again");
}

#[test]
fn quantiles_are_of_what_came_lately() {
    let (mut history, start) = (History::default(), Instant::now());
    let buckets = |fast: u32, all: u32| {
        let bucket = |le, n| format!("pinpool_w_bucket{{pool=\"p\",le=\"{le}\"}} {n}\n");
        bucket("0.001", fast) + &bucket("+Inf", all)
    };
    add(&mut history, start, 0, &buckets(1000, 1000));
    assert_eq!(history.quantile(0.99, "pinpool_w", "p"), Some(0.001));
    add(&mut history, start, 10, &buckets(1001, 1010));
    let half = history.quantile(0.5, "pinpool_w", "p");
    assert_eq!(half, Some(f64::INFINITY), "nine of ten new ones are long");
    assert_eq!(history.quantile(0.1, "pinpool_w", "p"), Some(0.001));
    assert_eq!(history.quantile(0.5, "pinpool_w", "q"), None);
}

#[test]
fn what_nobody_looks_at_is_stale() {
    let (mut history, start) = (History::default(), Instant::now());
    let (at, stamp) = (
        |second| start + Duration::from_secs(second),
        |n| format!("pinpool_sampled_timestamp_seconds{{pool=\"p\"}} {n}"),
    );
    for second in 0..5 {
        add(&mut history, start, second, &stamp(second));
    }
    assert_eq!(notes(&history, at(5)), ["no alarms"]);
    add(&mut history, start, 20, &stamp(4));
    assert_eq!(notes(&history, at(20)), ["no alarms"]);
    add(&mut history, start, 65, &stamp(4));
    let found = notes(&history, at(65));
    assert_eq!(found, ["ALARM: p: stale, not sampled in the last 61 s: the sampler has ended"]);
}

#[test]
fn a_server_that_is_gone_leaves_stale_numbers() {
    let (mut history, start) = (History::default(), Instant::now());
    history.add(start, Err("no process listens there".into()));
    assert_eq!(notes(&history, start), ["ALARM: no process listens there"]);
    add(&mut history, start, 0, "");
    assert_eq!(notes(&history, start), ["no alarms"]);
    history.add(start, Err("no process listens there".into()));
    let found = notes(&history, start + Duration::from_secs(7));
    assert_eq!(found, ["ALARM: stale: no process listens there; what is shown is 7 s old"]);
}

/// An operator looks for what is lost or stuck first; a pool may have a hundred size classes.
#[test]
fn devices_come_first_and_ten_classes_at_most() {
    let (mut history, start) = (History::default(), Instant::now());
    let classes = |checkouts: u32| -> String {
        // Of the larger classes less is out, and more bytes.
        let class = |n: u32| {
            let labels = format!("{{pool=\"p\",stride=\"{}\"}}", n << 10);
            format!(
                "pinpool_class_out_segments{labels} {}\npinpool_class_free_segments{labels} 2\n\
                 pinpool_class_checkouts_total{labels} {checkouts}\n",
                if n == 1 { 9000 } else { 200 - n }
            )
        };
        (1..=70)
            .map(class)
            .chain(["pinpool_class_out_segments{pool=\"p\",stride=\"large\"} 1\n".into()])
            .collect()
    };
    let device = "pinpool_device_lost{device=\"cuda:0\"} 0\n";
    for (second, checkouts) in [(0, 0), (10, 100)] {
        add(&mut history, start, second, &format!("{device}{}", classes(checkouts)));
    }
    let text = history.page(start + Duration::from_secs(10));
    assert!(text.find("devices ").unwrap() < text.find("Pool p: ").unwrap(), "{text}");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip_while(|line| !line.starts_with("classes "))
        .take_while(|line| !line.is_empty())
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    let names: Vec<&str> = rows[1..].iter().map(|row| row[0]).collect();
    // Those of which most bytes are out, the largest share first.
    assert_eq!(names[..4], ["larger", "70 KiB", "69 KiB", "1 KiB"], "{text}");
    assert_eq!(names.len(), 10 + 1, "{text}");
    assert_eq!(names[10], "warning: 61 more classes are not shown", "{text}");
    assert_eq!(rows[2], ["70 KiB", "130", "2", "0", "10.0/s"], "{text}");
}

/// The sampler sends zeros for a pool that has ended, and a recorder keeps those for good.
#[test]
fn a_pool_that_has_ended_is_not_shown() {
    let (mut history, start) = (History::default(), Instant::now());
    let other = |capacity: u32, stamp: u64| {
        format!(
            "pinpool_memory_capacity_bytes{{pool=\"q\"}} {capacity}\n\
             pinpool_sampled_timestamp_seconds{{pool=\"q\"}} {stamp}\n\
             pinpool_sampled_timestamp_seconds{{pool=\"p\"}} "
        )
    };
    let at = |second| start + Duration::from_secs(second);
    for second in 0..5 {
        add(&mut history, start, second, &format!("{}{}", other(4096, second + 1), second + 1));
    }
    assert!(history.page(at(5)).contains("Pool q: "));
    for second in 5..30 {
        add(&mut history, start, second, &format!("{}{}", other(0, 0), second + 1));
    }
    let text = history.page(at(30));
    assert_eq!(notes(&history, at(30)), ["no alarms"]);
    assert!(!text.contains("Pool q: ") && text.contains("Pool p: "), "{text}");
}
