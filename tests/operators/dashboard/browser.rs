//! The page in a headless Chromium. Time there is the browser's own (`--virtual-time-budget`): it goes on when nothing
//! else is to be done, so a minute takes an instant, and nothing depends on how busy the machine is.

use std::sync::{Mutex, PoisonError};

use super::fake::{CONDITIONS, Fake, pool};
use super::{output, program};

/// The page as Chromium has it after that many seconds of its time. `None`: there is no Chromium.
fn dom(seconds: u32, url: &str) -> Option<String> {
    let mut command = program("browser", &["chromium", "chromium-browser", "google-chrome"])?;
    // Browsers are heavy: one at a time.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let profile = tempfile::tempdir().unwrap();
    // In a container, and as root, there is no sandbox to be had; the page is the test's own.
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
    ]);
    command.args(["--no-first-run", "--disable-background-networking", "--no-proxy-server"]);
    command.arg(format!("--user-data-dir={}", profile.path().display()));
    command.arg(format!("--virtual-time-budget={}", seconds * 1000)).args(["--dump-dom", url]);
    let dom = output(&mut command);
    // Without the script, which has all texts.
    let (before, rest) = dom.split_once("<script>").unwrap();
    Some(format!("{before}{}", rest.split_once("</script>").unwrap().1))
}

#[track_caller]
fn has(dom: &str, words: &[&str]) {
    for word in words {
        assert!(dom.contains(word), "the page lacks {word:?}:\n{dom}");
    }
}

/// What an operator looks for first is on the first screen, however many size classes a pool has. A pool that
/// has ended is not shown, and a name is text and nothing else.
#[test]
fn numbers_and_rates_are_those_of_the_metrics() {
    let name = "<img src=x onerror=alert(1)> \\\"q\\\" \\\\";
    let class = |n: u32| {
        let labels = format!("{{pool=\"{name}\",stride=\"{}\"}}", n << 10);
        format!("pinpool_class_out_segments{labels} 5\npinpool_class_free_segments{labels} 2\n")
    };
    let classes: String = (1..=70).map(class).collect();
    let ended =
        "pinpool_memory_capacity_bytes{pool=\"q\"} 0\npinpool_sampled_timestamp_seconds{pool=\"q\"} 0\n";
    let fake = Fake::start(move |n| {
        let line = |metric: &str, step: u32| format!("{metric}{{pool=\"{name}\"}} {}", 1000 + n * step);
        let lines = [
            line("pinpool_checkouts_total", 400),
            line("pinpool_misses_total", 100),
            line("pinpool_sampled_timestamp_seconds", 1),
            format!(
                "pinpool_device_copied_bytes_total{{device=\"cuda:0\",direction=\"upload\"}} {}",
                u64::from(n) * 25_000_000_000
            ),
        ];
        (200, pool(name, &lines.each_ref().map(String::as_str)) + &classes + ended)
    });
    let Some(dom) = dom(20, &fake.url("/")) else { return };
    has(&dom, &["Pool &lt;img src=x onerror=alert(1)&gt; \"q\" \\: 80.0 MiB of 100 MiB in use (80%)"]);
    has(&dom, &[">live<", "No alarms", "50.0 MiB", "30.0 MiB", "cuda:0, stream 7", ">12<"]);
    assert!(!dom.contains("<img") && !dom.contains("Pool q: "), "{dom}");
    assert!(dom.find(">Devices<").unwrap() < dom.find("Pool &lt;").unwrap(), "{dom}");
    has(&dom, &[">70.0 KiB<", ">larger<", ">62 more<", "5 of 7 out"]);
    assert!(!dom.contains(">1.0 KiB<") && !dom.contains(">50.0 KiB<"), "{dom}");
    // A fetch in each second of the browser's time, give or take what a fetch takes.
    has(&dom, &["75%", "of 50.00 GB/s"]);
    let speed = dom.split(" GB/s, ").next().unwrap().rsplit('>').next().unwrap().parse::<f64>().unwrap();
    assert!((20.0..=25.5).contains(&speed), "{speed}");
    assert!(!dom.contains("NaN") && !dom.contains("undefined") && !dom.contains("Infinity"), "{dom}");
    // Only the page could make the browser ask for another path.
    let asked = fake.asked.lock().unwrap();
    assert!(asked.iter().all(|path| path == "/" || path == "/metrics"), "{asked:?}");
}

#[test]
fn each_condition_is_said_in_words() {
    // Of a pool whose waits time out it is not said that it waits.
    let waits = ["pinpool_waits_total{pool=\"q\"} 5", "pinpool_memory_capacity_bytes{pool=\"q\"} 4096"];
    let bad = pool("p", &[&CONDITIONS[..8], &waits[..]].concat());
    // Counters rise after the first fetch.
    let fake = Fake::start(move |n| (200, if n == 0 { pool("p", &[]) } else { bad.clone() }));
    let Some(dom) = dom(5, &fake.url("/")) else { return };
    has(&dom, &["15.0 MiB are quarantined", "nearly full, 95%", "buffers out for too long: 3 (0 B)"]);
    has(&dom, &["4.0 KiB are not pinned", "memlock", "cuda:0 is lost", ">lost<"]);
    has(&dom, &["cuda:0: streams that get nothing done: 2", "p: waits for memory timed out"]);
    has(
        &dom,
        &["p: checkouts refused", "queue full: 3", "q: requests that had to wait", "pinning ended early"],
    );
    has(&dom, &["Alarm: ", "Warning: ", ">6 alarms, 4 warnings<"]);
    assert!(!dom.contains("No alarms"), "{dom}");
}

/// A server that has ended, a pool that nobody samples any more, and a server without pools.
#[test]
fn what_is_stale_or_missing_is_said() {
    let ended = Fake::start(|n| if n < 3 { (200, pool("p", &[])) } else { (503, String::new()) });
    let Some(page) = dom(15, &ended.url("/")) else { return };
    let why = "the server does not answer (status 503)";
    has(&page, &["<body class=\"stale\">", ">stale<", why, "Pool p: 80.0 MiB"]);
    let age = page.split("What is shown is ").nth(1).unwrap().split(' ').next().unwrap();
    assert!((8..=14).contains(&age.parse().unwrap()), "{age} s of the browser's time");
    let unsampled = Fake::start(|n| {
        let gone = format!("pinpool_sampled_timestamp_seconds{{pool=\"p\"}} {}", n.min(3));
        (200, pool("p", &[&gone]))
    });
    let page = dom(30, &unsampled.url("/")).unwrap();
    has(&page, &["<body class=\"stale\">", "this pool was last sampled 2"]);
    let other = Fake::saying("up 1\n".into());
    has(&dom(3, &other.url("/")).unwrap(), &["no data: no metrics of pinpool in its answer"]);
}
