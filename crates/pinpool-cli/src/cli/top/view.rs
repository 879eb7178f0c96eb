//! What `top` shows: rates, quantiles and alarms, computed from a server's answers of the last minutes.
//!
//! A [`History`] keeps the answers. [`History::page`] computes from them a [`Page`], which `--once` prints as text and
//! the screen draws. The page of `examples/dashboard` shows the same, from the same metrics; the two are changed
//! together.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::scrape::Scrape;
use super::text::Page;
use super::text::Severity::{Alarm, Fine, Warning};

/// The time that a rate is computed over.
const RATE: Duration = Duration::from_secs(5);
/// The time that quantiles, and alarms about events, are computed over.
const RECENT: Duration = Duration::from_secs(60);
/// How long an answer is kept: a little longer than [`RECENT`].
const KEEP: Duration = Duration::from_secs(70);
/// The most samples kept, all answers added up; ten thousand take a few megabytes. Large answers are kept for a shorter
/// time.
const KEPT: usize = 500_000;
/// The most pools, and the most devices, that are shown: a server with more is broken or hostile.
const SHOWN: usize = 50;
/// The most pools that are checked for alarms.
const ALARMING: usize = 1000;
/// The most alarms, and the most streams, that are shown.
const ROWS: usize = 100;
/// The most size classes of a pool that are shown: those of which most bytes are out.
const CLASSES: usize = 10;
/// The states of memory.
const STATES: [&str; 5] = ["checked_out", "in_flight", "quarantined", "cut", "free"];
/// The metric with the time at which the server's sampler last sampled a pool.
const SAMPLED: &str = "pinpool_sampled_timestamp_seconds";
/// The assumed number of seconds between two samples of a pool until two have been seen.
const ASSUMED_GAP: f64 = 10.0;

/// The last time stamp seen of a pool, when it was first seen, and the seconds from the stamp before it.
#[derive(Clone, Copy, Debug)]
struct LastSample {
    stamp: f64,
    at: Instant,
    gap: f64,
}

/// A server's answers of the last minutes.
#[derive(Debug, Default)]
pub struct History {
    scrapes: VecDeque<(Instant, Scrape)>,
    sampled: HashMap<Box<str>, LastSample>,
    /// Why the last fetch failed, if it did.
    pub trouble: Option<String>,
}

impl History {
    /// Adds the result of a fetch.
    pub fn add(&mut self, at: Instant, result: Result<Scrape, String>) {
        let scrape = match result {
            Ok(scrape) => scrape,
            Err(why) => return self.trouble = Some(why),
        };
        self.trouble = None;
        for (pool, _, stamp) in scrape.all(SAMPLED) {
            let fresh = LastSample { stamp, at, gap: ASSUMED_GAP };
            let seen = self.sampled.entry(pool.into()).or_insert(fresh);
            // By bits, since NaN does not equal itself.
            if seen.stamp.to_bits() != stamp.to_bits() {
                *seen = LastSample { gap: (stamp - seen.stamp).max(1.0), ..fresh };
            }
        }
        // Of a pool that has ended the time stamp is 0.
        self.sampled.retain(|pool, _| scrape.of(SAMPLED, pool).any(|(_, stamp)| stamp != 0.0));
        self.scrapes.push_back((at, scrape));
        // At least two answers stay, however long the interval is.
        let too_old = |old: &(Instant, Scrape)| at.saturating_duration_since(old.0) > KEEP;
        let mut kept: usize = self.scrapes.iter().map(|(_, scrape)| scrape.len()).sum();
        while self.scrapes.len() > 2 && (kept > KEPT || self.scrapes.front().is_some_and(too_old)) {
            kept -= self.scrapes.pop_front().map_or(0, |(_, scrape)| scrape.len());
        }
    }

    /// Everything to show. Before the first answer: one note that says why there is none.
    pub fn page(&self, now: Instant) -> Page {
        let mut page = Page::default();
        let Some((at, scrape)) = self.scrapes.back() else {
            match &self.trouble {
                Some(why) => page.note(Alarm, why),
                None => page.note(Fine, "waiting for the first answer"),
            }
            return page;
        };
        if let Some(why) = &self.trouble {
            let age = now.saturating_duration_since(*at).as_secs();
            page.note(Alarm, format!("stale: {why}; what is shown is {age} s old"));
        }
        let mut pools = scrape.all("pinpool_memory_capacity_bytes");
        pools.retain(|(_, _, capacity)| *capacity != 0.0);
        for (device, _, lost) in scrape.all("pinpool_device_lost").iter().take(SHOWN) {
            if *lost > 0.0 {
                page.note(Alarm, format!("{device} is lost: restart the process"));
            }
            let stuck = scrape.sum("pinpool_device_stuck_streams", device, None);
            if stuck > 0.0 {
                let what = "streams that get nothing done";
                page.note(Alarm, format!("{device}: {what}: {stuck}; a kernel or copy hangs"));
            }
        }
        for (pool, _, capacity) in pools.iter().take(ALARMING) {
            self.pool_alarms(scrape, pool, *capacity, now, &mut page);
        }
        let alarms = page.lines.len();
        page.lines.truncate(ROWS);
        more(alarms, ROWS, "alarms", &mut page);
        if alarms == 0 {
            page.note(Fine, "no alarms");
        }
        self.devices(scrape, &mut page);
        more(pools.len(), SHOWN, "pools", &mut page);
        for (pool, _, capacity) in pools.iter().take(SHOWN) {
            self.pool(scrape, pool, *capacity, &mut page);
        }
        page
    }

    /// The youngest answer that is at least `age` older than the last one, else the oldest, and the seconds between the
    /// two. `None`: there is only one answer.
    fn before(&self, age: Duration) -> Option<(f64, &Scrape)> {
        let (now, _) = self.scrapes.back()?;
        let old_enough = |old: &&(Instant, Scrape)| now.saturating_duration_since(old.0) >= age;
        let (at, scrape) = self.scrapes.iter().rev().find(old_enough).or(self.scrapes.front())?;
        let seconds = now.saturating_duration_since(*at).as_secs_f64();
        (seconds > 0.0).then_some((seconds, scrape))
    }

    /// By how much a counter rose over `age`, and in how many seconds: an owner's sum, or one part.
    fn since(&self, age: Duration, name: &str, owner: &str, part: Option<&str>) -> Option<(f64, f64)> {
        let (seconds, old) = self.before(age)?;
        let now = self.scrapes.back()?.1.sum(name, owner, part);
        let was = old.sum(name, owner, part);
        // A counter that fell was reset when its process started again.
        Some((if now >= was { now - was } else { now }, seconds))
    }

    pub fn rate(&self, name: &str, owner: &str, part: Option<&str>) -> Option<f64> {
        self.since(RATE, name, owner, part).map(|(count, seconds)| count / seconds)
    }

    /// An upper bound of a quantile of the values counted in the last minute, or of all values if there is only one
    /// answer.
    pub fn quantile(&self, q: f64, name: &str, owner: &str) -> Option<f64> {
        let name = format!("{name}_bucket");
        let (_, scrape) = self.scrapes.back()?;
        let bucket = |(bound, ever): (&str, f64)| {
            let count = self.since(RECENT, &name, owner, Some(bound)).map_or(ever, |(count, _)| count);
            Some((bound.parse::<f64>().ok()?, count))
        };
        let mut buckets = scrape.of(&name, owner).map(bucket).collect::<Option<Vec<_>>>()?;
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all = buckets.last()?.1;
        buckets.iter().find(|bucket| all > 0.0 && bucket.1 >= q * all).map(|bucket| bucket.0)
    }

    fn pool_alarms(&self, scrape: &Scrape, pool: &str, capacity: f64, now: Instant, page: &mut Page) {
        let of = |name: &str| scrape.sum(name, pool, None);
        let state = |state: &str| scrape.sum("pinpool_memory_bytes", pool, Some(state));
        let recent = |name: &str| self.since(RECENT, name, pool, None).map_or(0.0, |(count, _)| count);
        let mut note = |level, text: String| page.note(level, format!("{pool}: {text}"));
        // A minute, or the time that the history covers.
        let seconds = self.before(RECENT).map_or(0.0, |(seconds, _)| seconds.max(1.0));
        let lately = format!("in the last {seconds:.0} s");
        // An exporter keeps the last values of a pool that no longer exists.
        let seen = self
            .sampled
            .get(pool)
            .map(|seen| (now.saturating_duration_since(seen.at).as_secs_f64(), seen.gap));
        if let Some((idle, _)) = seen.filter(|(idle, gap)| *idle > 3.0 * gap + 3.0) {
            let why = "the pool or its sampler has ended";
            note(Alarm, format!("stale, this pool was last sampled {idle:.0} s ago: {why}"));
        }
        let used = of("pinpool_memory_bytes") - state("free");
        if used > 0.9 * capacity {
            let share = percent(used, capacity);
            let fix = "raise the capacity, or find what keeps buffers";
            note(Warning, format!("nearly full, {share} in use: {fix}"));
        }
        for (metric, level, what) in [
            ("pinpool_timeouts_total", Alarm, "waits for memory timed out"),
            ("pinpool_waits_total", Warning, "requests that had to wait for memory"),
            ("pinpool_refused_total", Warning, "checkouts refused"),
        ] {
            let count = recent(metric);
            if count > 0.0 {
                note(level, format!("{what} {lately}: {count}"));
            }
        }
        let quarantined = state("quarantined");
        if quarantined > 0.0 {
            note(Alarm, format!("{} are quarantined: unusable until the process ends", bytes(quarantined)));
        }
        let (stuck, size) = (of("pinpool_stuck_buffers"), bytes(of("pinpool_stuck_bytes")));
        if stuck > 0.0 {
            let log = "the log names them: pinpool::pool::stuck";
            note(Alarm, format!("buffers out for too long: {stuck} ({size}); {log}"));
        }
        let unpinned = of("pinpool_memory_unpinned_bytes");
        if unpinned > 0.0 {
            let fix = "raise the memlock limit, pinpool doctor says how";
            note(Warning, format!("{} are not pinned: {fix}", bytes(unpinned)));
        }
        if recent("pinpool_growth_failures_total") > 0.0 {
            note(Alarm, format!("pinning ended early {lately}: pinpool doctor says why"));
        }
    }

    fn pool(&self, scrape: &Scrape, pool: &str, capacity: f64, page: &mut Page) {
        let of = |name: &str| scrape.sum(name, pool, None);
        let rate = |name: &str| self.rate(name, pool, None);
        let state = |state: &str| scrape.sum("pinpool_memory_bytes", pool, Some(state));
        let held = of("pinpool_memory_bytes");
        let used = held - state("free");
        let share = percent(used, capacity);
        page.heading(format!("Pool {pool}: {} of {} in use ({share})", bytes(used), bytes(capacity)));
        let row = |name: &str, size: f64| [name.replace('_', " "), bytes(size), percent(size, capacity)];
        let mut rows = STATES.map(|name| row(name, state(name))).to_vec();
        rows.push(row("not taken from the system", (capacity - held).max(0.0)));
        page.table(["memory", "bytes", "of capacity"], rows);

        let counted = |name: &str| format!("{}, {} in all", per(rate(name)), of(name));
        let wait = |q| time(self.quantile(q, "pinpool_wait_seconds", pool));
        let hits = rate("pinpool_checkouts_total").zip(rate("pinpool_misses_total"));
        let hits = hits.map(|(all, misses)| percent((all - misses).max(0.0), all));
        let rows = [
            ("requests waiting now", of("pinpool_waiting_requests").to_string()),
            ("waits", counted("pinpool_waits_total")),
            ("timed out", counted("pinpool_timeouts_total")),
            ("abandoned by clients", counted("pinpool_abandoned_total")),
            ("refused", counted("pinpool_refused_total")),
            ("refused most for", shown(self.reason(scrape, pool))),
            ("half of the waits", wait(0.5)),
            ("99% of the waits", wait(0.99)),
            ("99% of buffers held for", time(self.quantile(0.99, "pinpool_holding_seconds", pool))),
            ("checkouts", per(rate("pinpool_checkouts_total"))),
            ("from the thread's own cache", shown(hits)),
            ("pinned", bytes(of("pinpool_memory_pinned_bytes"))),
            ("not pinned", bytes(of("pinpool_memory_unpinned_bytes"))),
            ("most in use or cached lately", bytes(of("pinpool_memory_peak_bytes"))),
            ("longest free piece", bytes(of("pinpool_memory_largest_free_bytes"))),
        ];
        page.table(["use", ""], rows.map(|(name, value)| [name.to_owned(), value]).to_vec());

        // Each class: bytes of a segment; segments out, free, and cached by threads; checkouts a second.
        let class = |(stride, out): (&str, f64)| {
            let of = |name: &str| scrape.sum(name, pool, Some(stride));
            let counts = [out, of("pinpool_class_free_segments"), of("pinpool_class_cached_segments")];
            let checkouts = self.rate("pinpool_class_checkouts_total", pool, Some(stride));
            (stride.parse().unwrap_or(f64::INFINITY), counts, checkouts)
        };
        let mut classes: Vec<_> = scrape.of("pinpool_class_out_segments", pool).map(class).collect();
        // Those of which most bytes are out, then free.
        let all = |size: f64, count: f64| if count > 0.0 { count * size } else { 0.0 };
        let order = |a: &(f64, [f64; 3], _), b: &(f64, [f64; 3], _)| {
            let by = |at: usize| all(b.0, b.1[at]).total_cmp(&all(a.0, a.1[at]));
            by(0).then(by(1))
        };
        classes.sort_by(order);
        let rest = classes.split_off(classes.len().min(CLASSES));
        classes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let row = |name: String, of: &[(f64, [f64; 3], Option<f64>)]| {
            let sum = |at: usize| of.iter().fold(0.0, |sum, (_, counts, _)| sum + counts[at]).to_string();
            let checkouts = of.iter().filter_map(|(.., checkouts)| *checkouts).reduce(|sum, rate| sum + rate);
            [name, sum(0), sum(1), sum(2), per(checkouts)]
        };
        let name = |size: f64| if size.is_finite() { bytes(size) } else { "larger".into() };
        let mut rows: Vec<_> = classes.chunks(1).map(|class| row(name(class[0].0), class)).collect();
        if !rest.is_empty() {
            rows.push(row(format!("{} more", rest.len()), &rest));
        }
        page.table(["class", "out", "free", "kept by threads", "checkouts"], rows);
    }

    /// The reason for which most checkouts were refused lately, or ever.
    fn reason(&self, scrape: &Scrape, pool: &str) -> Option<String> {
        let name = "pinpool_refused_total";
        let counts = scrape.of(name, pool).filter(|(_, ever)| *ever > 0.0).map(|(reason, ever)| {
            let lately = self.since(RECENT, name, pool, Some(reason)).map_or(0.0, |(count, _)| count);
            (lately, ever, reason)
        });
        let most = counts.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        most.map(|(.., reason)| reason.replace('_', " "))
    }

    fn devices(&self, scrape: &Scrape, page: &mut Page) {
        page.heading("Devices".into());
        let (mut rows, mut links) = (Vec::new(), Vec::new());
        let devices = scrape.all("pinpool_device_lost");
        for (device, _, lost) in devices.iter().take(SHOWN) {
            for direction in ["upload", "download"] {
                let speed = self.rate("pinpool_device_copied_bytes_total", device, Some(direction));
                // The link's peak is known only if the server exports it.
                let peak = scrape.get("server_link_peak_bytes_per_second", device, direction);
                let share = peak.zip(speed).map(|(peak, speed)| percent(speed, peak));
                links.push([format!("{device} {direction}"), gb(speed), shown(share), gb(peak)]);
            }
            rows.push([
                (*device).to_owned(),
                if *lost > 0.0 { "lost" } else { "works" }.to_owned(),
                per(self.rate("pinpool_device_submitted_total", device, None)),
                time(self.quantile(0.99, "pinpool_flight_seconds", device)),
                scrape.sum("pinpool_device_errors_total", device, None).to_string(),
            ]);
        }
        more(devices.len(), SHOWN, "devices", page);
        page.table(["device", "state", "submitted", "99% of flights", "errors"], rows);
        page.table(["link", "speed", "of peak", "peak"], links);
        let mut streams = scrape.all("pinpool_stream_in_flight_entries");
        streams.sort_by_key(|(device, stream, _)| (*device, stream.parse::<u64>().ok()));
        let row = |(device, stream, entries): &(&str, &str, f64)| {
            let size = scrape.sum("pinpool_stream_in_flight_bytes", device, Some(stream));
            [format!("{device} stream {stream}"), entries.to_string(), bytes(size)]
        };
        let rows = streams.iter().take(ROWS).map(row).collect();
        page.table(["in flight", "copies and holds", "bytes"], rows);
        more(streams.len(), ROWS, "streams", page);
    }
}

/// Adds a note with the number of rows that are not shown, if there are any.
fn more(count: usize, shown: usize, what: &str, page: &mut Page) {
    if let Some(more @ 1..) = count.checked_sub(shown) {
        page.note(Warning, format!("{more} more {what} are not shown"));
    }
}

fn bytes(mut n: f64) -> String {
    let mut unit = 0;
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    while n.abs() >= 1024.0 && unit + 1 < UNITS.len() {
        n /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && n < 100.0);
    format!("{n:.digits$} {}", UNITS[unit])
}

fn shown(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}

fn per(rate: Option<f64>) -> String {
    shown(rate.map(|rate| format!("{rate:.digits$}/s", digits = usize::from(rate < 10.0))))
}

fn gb(speed: Option<f64>) -> String {
    shown(speed.map(|speed| format!("{:.2} GB/s", speed / 1e9)))
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.0}%", 100.0 * part / whole) } else { "-".into() }
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "none".into(),
        Some(s) if s.is_infinite() => "over 1,000 s".into(),
        Some(s) if s >= 1.0 => format!("<= {s:.1} s"),
        Some(s) if s >= 1e-3 => format!("<= {:.1} ms", s * 1e3),
        Some(s) => format!("<= {:.0} us", s * 1e6),
    }
}
