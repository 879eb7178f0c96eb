//! What `top` shows: rates, quantiles and alarms, computed from a server's answers of the last minutes.
//!
//! A [`History`] keeps the answers. [`History::items`] computes from them a list of [`ViewItem`]s without colours or
//! positions, which `--once` prints as text and the screen draws. The page of `examples/dashboard` shows the same, from
//! the same metrics; the two are changed together.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::scrape::Scrape;

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
/// The most alarms that are shown.
const ALARMS: usize = 100;
/// The most size classes of a pool that are shown.
const SHOWN_CLASSES: usize = 100;
/// The most streams that are shown.
const SHOWN_STREAMS: usize = 100;
/// The metric with the time at which the server's sampler last sampled a pool.
const SAMPLED: &str = "pinpool_sampled_timestamp_seconds";
/// The assumed number of seconds between two samples of a pool until two have been seen.
const ASSUMED_GAP: f64 = 10.0;

/// The severity of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    Fine,
    Warning,
    Alarm,
}

/// A part of what is shown.
#[derive(Clone, Debug, PartialEq)]
pub enum ViewItem {
    Heading(String),
    Note(Severity, String),
    /// Parts of a whole, by state.
    Bar(Vec<(&'static str, f64)>, f64),
    /// Heads and rows; the first column is left-aligned.
    Table(Vec<&'static str>, Vec<Vec<String>>),
}

/// The states of memory, in the order of the bar.
pub const STATES: [&str; 5] = ["checked_out", "in_flight", "quarantined", "cut", "free"];

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
    trouble: Option<String>,
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
        self.sampled.retain(|pool, _| scrape.of(SAMPLED, pool).next().is_some());
        self.scrapes.push_back((at, scrape));
        // At least two answers stay, however long the interval is.
        let too_old = |old: &(Instant, Scrape)| at.saturating_duration_since(old.0) > KEEP;
        let mut kept: usize = self.scrapes.iter().map(|(_, scrape)| scrape.len()).sum();
        while self.scrapes.len() > 2 && (kept > KEPT || self.scrapes.front().is_some_and(too_old)) {
            kept -= self.scrapes.pop_front().map_or(0, |(_, scrape)| scrape.len());
        }
    }

    /// Why the last fetch failed, if it did.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Everything to show. Before the first answer: one note that says why there is none.
    pub fn items(&self, now: Instant) -> Vec<ViewItem> {
        let mut items = Vec::new();
        let Some((at, scrape)) = self.scrapes.back() else {
            let waiting = "waiting for the first answer".to_owned();
            let note = self.trouble.clone().map_or((Severity::Fine, waiting), |why| (Severity::Alarm, why));
            return vec![ViewItem::Note(note.0, note.1)];
        };
        if let Some(why) = &self.trouble {
            let age = now.saturating_duration_since(*at).as_secs();
            items
                .push(ViewItem::Note(Severity::Alarm, format!("stale: {why}; what is shown is {age} s old")));
        }
        let pools = scrape.all("pinpool_memory_capacity_bytes");
        device_alarms(scrape, &mut items);
        for (pool, _, capacity) in pools.iter().take(ALARMING) {
            self.pool_alarms(scrape, pool, *capacity, now, &mut items);
        }
        let alarms = items.len();
        items.truncate(ALARMS);
        more(alarms, ALARMS, "alarms", &mut items);
        if items.is_empty() {
            items.push(ViewItem::Note(Severity::Fine, "no alarms".into()));
        }
        more(pools.len(), SHOWN, "pools", &mut items);
        for (pool, _, capacity) in pools.iter().take(SHOWN) {
            self.pool(scrape, pool, *capacity, &mut items);
        }
        self.devices(scrape, &mut items);
        items
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

    fn rate(&self, name: &str, owner: &str, part: Option<&str>) -> Option<f64> {
        self.since(RATE, name, owner, part).map(|(count, seconds)| count / seconds)
    }

    fn recent(&self, name: &str, pool: &str) -> f64 {
        self.since(RECENT, name, pool, None).map_or(0.0, |(count, _)| count)
    }

    /// An upper bound of a quantile of the values counted in the last minute, or of all values if there is only one
    /// answer.
    fn quantile(&self, q: f64, name: &str, owner: &str) -> Option<f64> {
        let name = format!("{name}_bucket");
        let (_, scrape) = self.scrapes.back()?;
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (bound, ever) in scrape.of(&name, owner) {
            let count = self.since(RECENT, &name, owner, Some(bound)).map_or(ever, |(count, _)| count);
            buckets.push((bound.parse().ok()?, count));
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all = buckets.last()?.1;
        buckets.iter().find(|bucket| all > 0.0 && bucket.1 >= q * all).map(|bucket| bucket.0)
    }

    /// The seconds since a pool was last sampled, if that is too long: an exporter keeps the last values of a pool that
    /// no longer exists.
    fn idle(&self, pool: &str, now: Instant) -> Option<f64> {
        let seen = self.sampled.get(pool)?;
        let idle = now.saturating_duration_since(seen.at).as_secs_f64();
        (idle > 3.0 * seen.gap + 3.0).then_some(idle)
    }

    fn pool_alarms(
        &self,
        scrape: &Scrape,
        pool: &str,
        capacity: f64,
        now: Instant,
        items: &mut Vec<ViewItem>,
    ) {
        let of = |name: &str| scrape.sum(name, pool, None);
        let state = |state: &str| scrape.sum("pinpool_memory_bytes", pool, Some(state));
        let recent = |name: &str| self.recent(name, pool);
        // A minute, or the time that the history covers.
        let seconds = self.before(RECENT).map_or(0.0, |(seconds, _)| seconds.max(1.0));
        let lately = format!("in the last {seconds:.0} s");
        let used = of("pinpool_memory_bytes") - state("free");
        let timeouts = recent("pinpool_timeouts_total");
        // If requests timed out, the alarm about these takes the place of the warning.
        let waits = if timeouts > 0.0 { 0.0 } else { recent("pinpool_waits_total") };
        let plain = recent("pinpool_unpinned_fallbacks_total");
        let (quarantined, stuck) = (state("quarantined"), of("pinpool_stuck_buffers"));
        let (unlocked, idle) = (of("pinpool_memory_unlocked_bytes"), self.idle(pool, now));
        use Severity::{Alarm, Warning};
        let notes = [
            (idle.is_some(), Alarm, {
                let seconds = idle.unwrap_or_default();
                format!(
                    "stale, this pool was last sampled {seconds:.0} s ago: the pool or its sampler has ended"
                )
            }),
            (used > 0.9 * capacity, Warning, {
                let share = percent(used, capacity);
                format!("nearly full, {share} in use: raise the capacity, or find what keeps buffers")
            }),
            (timeouts > 0.0, Alarm, format!("waits for memory given up {lately}: {timeouts}")),
            (waits > 0.0, Warning, format!("requests that had to wait for memory {lately}: {waits}")),
            (plain > 0.0, Warning, format!("unpinned buffers in place of pinned ones {lately}: {plain}")),
            (
                quarantined > 0.0,
                Alarm,
                format!("{} are quarantined: unusable until the process ends", bytes(quarantined)),
            ),
            (stuck > 0.0, Alarm, {
                let size = bytes(of("pinpool_stuck_bytes"));
                format!(
                    "buffers out for too long: {stuck} ({size}); the log names them: pinpool::pool::stuck"
                )
            }),
            (unlocked > 0.0, Warning, {
                let size = bytes(unlocked);
                format!("{size} are not page-locked: raise the memlock limit, pinpool doctor says how")
            }),
            (
                recent("pinpool_growth_failures_total") > 0.0,
                Alarm,
                format!("pinning ended early {lately}: pinpool doctor says why"),
            ),
        ];
        let raised = notes.into_iter().filter(|(raised, ..)| *raised);
        items.extend(raised.map(|(_, level, text)| ViewItem::Note(level, format!("{pool}: {text}"))));
    }

    fn pool(&self, scrape: &Scrape, pool: &str, capacity: f64, items: &mut Vec<ViewItem>) {
        let of = |name: &str| scrape.sum(name, pool, None);
        let rate = |name: &str| self.rate(name, pool, None);
        let state = |state: &str| scrape.sum("pinpool_memory_bytes", pool, Some(state));
        let held = of("pinpool_memory_bytes");
        let used = held - state("free");
        items.push(ViewItem::Heading(format!(
            "Pool {pool}: {} of {} in use ({})",
            bytes(used),
            bytes(capacity),
            percent(used, capacity)
        )));
        items.push(ViewItem::Bar(STATES.map(|name| (name, state(name))).to_vec(), capacity));
        let mut states: Vec<Vec<String>> = STATES
            .iter()
            .map(|name| vec![name.replace('_', " "), bytes(state(name)), percent(state(name), capacity)])
            .collect();
        let rest = (capacity - held).max(0.0);
        states.push(vec!["not taken from the system".into(), bytes(rest), percent(rest, capacity)]);
        items.push(ViewItem::Table(vec!["memory", "bytes", "of capacity"], states));

        let counted = |name: &str| format!("{}, {} in all", per(rate(name)), of(name));
        let wait = |q| time(self.quantile(q, "pinpool_wait_seconds", pool));
        let hits = match (rate("pinpool_checkouts_total"), rate("pinpool_misses_total")) {
            (Some(all), Some(misses)) if all > 0.0 => percent((all - misses).max(0.0), all),
            _ => "-".into(),
        };
        let rows = [
            ("requests waiting now", of("pinpool_waiting_requests").to_string()),
            ("waits", counted("pinpool_waits_total")),
            ("waits given up", counted("pinpool_timeouts_total")),
            ("half of the waits", wait(0.5)),
            ("99% of the waits", wait(0.99)),
            ("99% of buffers held for", time(self.quantile(0.99, "pinpool_holding_seconds", pool))),
            ("checkouts", per(rate("pinpool_checkouts_total"))),
            ("from the thread's own cache", hits),
            ("page-locked", bytes(of("pinpool_memory_locked_bytes"))),
            ("not page-locked", bytes(of("pinpool_memory_unlocked_bytes"))),
            ("longest free piece", bytes(of("pinpool_memory_largest_free_bytes"))),
        ];
        let rows = rows.map(|(name, value)| vec![name.to_owned(), value]).to_vec();
        items.push(ViewItem::Table(vec!["use", ""], rows));

        let out: Vec<_> = scrape.of("pinpool_class_out_segments", pool).collect();
        let mut classes: Vec<(f64, Vec<String>)> = Vec::new();
        for (stride, out) in out.iter().take(SHOWN_CLASSES) {
            let size: Option<f64> = stride.parse().ok();
            let count = |name| scrape.sum(name, pool, Some(stride)).to_string();
            classes.push((
                size.unwrap_or(f64::INFINITY),
                vec![
                    size.map_or_else(|| "larger".to_owned(), bytes),
                    out.to_string(),
                    count("pinpool_class_free_segments"),
                    count("pinpool_class_cached_segments"),
                    per(self.rate("pinpool_class_checkouts_total", pool, Some(stride))),
                ],
            ));
        }
        classes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rows = classes.into_iter().map(|(_, row)| row).collect();
        items.push(ViewItem::Table(vec!["class", "out", "free", "kept by threads", "checkouts"], rows));
        more(out.len(), SHOWN_CLASSES, "classes", items);
    }

    fn devices(&self, scrape: &Scrape, items: &mut Vec<ViewItem>) {
        items.push(ViewItem::Heading("Devices".into()));
        let (mut rows, mut links) = (Vec::new(), Vec::new());
        let devices = scrape.all("pinpool_device_lost");
        for (device, _, lost) in devices.iter().take(SHOWN) {
            for direction in ["upload", "download"] {
                let speed = self.rate("pinpool_device_copied_bytes_total", device, Some(direction));
                // The link's peak is known only if the server exports it.
                let peak = scrape.get("server_link_peak_bytes_per_second", device, direction);
                let share =
                    peak.zip(speed).map_or_else(|| "-".to_owned(), |(peak, speed)| percent(speed, peak));
                links.push(vec![format!("{device} {direction}"), gb(speed), share, gb(peak)]);
            }
            rows.push(vec![
                (*device).to_owned(),
                if *lost > 0.0 { "lost" } else { "works" }.to_owned(),
                per(self.rate("pinpool_device_submitted_total", device, None)),
                time(self.quantile(0.99, "pinpool_flight_seconds", device)),
                scrape.sum("pinpool_device_errors_total", device, None).to_string(),
            ]);
        }
        more(devices.len(), SHOWN, "devices", items);
        items.push(ViewItem::Table(vec!["device", "state", "submitted", "99% of flights", "errors"], rows));
        items.push(ViewItem::Table(vec!["link", "speed", "of peak", "peak"], links));
        let mut streams = scrape.all("pinpool_stream_in_flight_entries");
        streams.sort_by_key(|(device, stream, _)| (*device, stream.parse::<u64>().ok()));
        let row = |(device, stream, entries): &(&str, &str, f64)| {
            let size = scrape.sum("pinpool_stream_in_flight_bytes", device, Some(stream));
            vec![format!("{device} stream {stream}"), entries.to_string(), bytes(size)]
        };
        let rows = streams.iter().take(SHOWN_STREAMS).map(row).collect();
        items.push(ViewItem::Table(vec!["in flight", "copies and holds", "bytes"], rows));
        more(streams.len(), SHOWN_STREAMS, "streams", items);
    }
}

/// Adds a note with the number of rows that are not shown, if there are any.
fn more(count: usize, shown: usize, what: &str, items: &mut Vec<ViewItem>) {
    if let Some(more @ 1..) = count.checked_sub(shown) {
        items.push(ViewItem::Note(Severity::Warning, format!("{more} more {what} are not shown")));
    }
}

fn device_alarms(scrape: &Scrape, items: &mut Vec<ViewItem>) {
    let mut add = |name: &str, text: fn(&str, f64) -> String| {
        let raised = scrape.all(name).into_iter().filter(|(.., value)| *value > 0.0).take(SHOWN);
        items.extend(raised.map(|(device, _, value)| ViewItem::Note(Severity::Alarm, text(device, value))));
    };
    add("pinpool_device_lost", |device, _| format!("{device} is lost: restart the process"));
    add("pinpool_device_stuck_streams", |device, streams| {
        format!("{device}: streams that get nothing done: {streams}; a kernel or copy hangs")
    });
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

fn per(rate: Option<f64>) -> String {
    match rate {
        None => "-".into(),
        Some(rate) if rate < 10.0 => format!("{rate:.1}/s"),
        Some(rate) => format!("{rate:.0}/s"),
    }
}

fn gb(speed: Option<f64>) -> String {
    speed.map_or_else(|| "-".into(), |speed| format!("{:.2} GB/s", speed / 1e9))
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

#[cfg(test)]
mod tests {
    use super::super::scrape::parsed;
    use super::*;

    /// A pool of 100 MiB, of which 20 MiB are free.
    const POOL: &str = "pinpool_memory_capacity_bytes{pool=\"p\"} 104857600\n\
                        pinpool_memory_bytes{pool=\"p\",state=\"free\"} 20971520\n\
                        pinpool_memory_bytes{pool=\"p\",state=\"checked_out\"} 83886080\n";

    fn notes(history: &History, now: Instant) -> Vec<(Severity, String)> {
        let note = |item| if let ViewItem::Note(level, text) = item { Some((level, text)) } else { None };
        history.items(now).into_iter().filter_map(note).collect()
    }

    fn add(history: &mut History, at: Instant, more: &str) {
        history.add(at, Ok(parsed(&format!("{POOL}{more}\n"))));
    }

    #[test]
    fn rates_are_of_the_last_seconds_and_survive_a_restart() {
        let (mut history, start) = (History::default(), Instant::now());
        for (second, count) in [(0, 1000), (5, 1000), (10, 1100)] {
            add(
                &mut history,
                start + Duration::from_secs(second),
                &format!("pinpool_c_total{{pool=\"p\"}} {count}"),
            );
        }
        assert_eq!(history.rate("pinpool_c_total", "p", None), Some(20.0));
        add(&mut history, start + Duration::from_secs(15), "pinpool_c_total{pool=\"p\"} 50");
        assert_eq!(history.rate("pinpool_c_total", "p", None), Some(10.0), "50 since it started again");
    }

    #[test]
    fn quantiles_are_of_what_came_lately() {
        let (mut history, start) = (History::default(), Instant::now());
        let buckets = |fast: u32, all: u32| {
            format!(
                "pinpool_w_bucket{{pool=\"p\",le=\"0.001\"}} {fast}\npinpool_w_bucket{{pool=\"p\",le=\"+Inf\"}} {all}"
            )
        };
        add(&mut history, start, &buckets(1000, 1000));
        assert_eq!(history.quantile(0.99, "pinpool_w", "p"), Some(0.001));
        add(&mut history, start + Duration::from_secs(10), &buckets(1001, 1010));
        assert_eq!(
            history.quantile(0.5, "pinpool_w", "p"),
            Some(f64::INFINITY),
            "nine of ten new ones are long"
        );
        assert_eq!(history.quantile(0.1, "pinpool_w", "p"), Some(0.001));
        assert_eq!(history.quantile(0.5, "pinpool_w", "q"), None);
    }

    #[test]
    fn what_nobody_looks_at_is_stale() {
        let (mut history, start) = (History::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        for second in 0..5 {
            add(
                &mut history,
                at(second),
                &format!("pinpool_sampled_timestamp_seconds{{pool=\"p\"}} {second}"),
            );
        }
        assert_eq!(notes(&history, at(5)), [(Severity::Fine, "no alarms".into())]);
        add(&mut history, at(20), "pinpool_sampled_timestamp_seconds{pool=\"p\"} 4");
        let found = notes(&history, at(20));
        assert!(found.len() == 1 && found[0].1.contains("this pool was last sampled 16 s ago"), "{found:?}");
    }

    #[test]
    fn a_server_that_is_gone_leaves_stale_numbers() {
        let (mut history, start) = (History::default(), Instant::now());
        history.add(start, Err("no process listens there".into()));
        assert_eq!(notes(&history, start), [(Severity::Alarm, "no process listens there".into())]);
        add(&mut history, start, "");
        assert_eq!(notes(&history, start), [(Severity::Fine, "no alarms".into())]);
        history.add(start, Err("no process listens there".into()));
        let found = notes(&history, start + Duration::from_secs(7));
        assert_eq!(
            found,
            [(Severity::Alarm, "stale: no process listens there; what is shown is 7 s old".into())]
        );
    }

    #[test]
    fn each_condition_is_said() {
        for (metric, words) in [
            (
                "pinpool_memory_bytes{pool=\"p\",state=\"quarantined\"} 15728640",
                ["15.0 MiB are quarantined", "nearly full, 95%"],
            ),
            ("pinpool_stuck_buffers{pool=\"p\"} 3", ["out for too long: 3 (0 B)", "pinpool::pool::stuck"]),
            ("pinpool_memory_unlocked_bytes{pool=\"p\"} 4096", ["4.0 KiB are not page-locked", "memlock"]),
            ("pinpool_device_lost{device=\"cuda:0\"} 1", ["cuda:0 is lost", "restart"]),
            (
                "pinpool_device_stuck_streams{device=\"cuda:0\"} 2",
                ["cuda:0: streams that get nothing done: 2", "hangs"],
            ),
            ("pinpool_timeouts_total{pool=\"p\"} 4", ["waits for memory given up", "in the last 1 s: 4"]),
            ("pinpool_waits_total{pool=\"p\"} 5", ["requests that had to wait", "in the last 1 s: 5"]),
            ("pinpool_unpinned_fallbacks_total{pool=\"p\"} 6", ["unpinned buffers", "in the last 1 s: 6"]),
            ("pinpool_growth_failures_total{pool=\"p\"} 1", ["pinning ended early", "doctor"]),
        ] {
            let (mut history, start) = (History::default(), Instant::now());
            add(&mut history, start, "");
            add(&mut history, start + Duration::from_secs(1), metric);
            let found = format!("{:?}", notes(&history, start));
            assert!(words.iter().all(|word| found.contains(word)), "{metric}: {found}");
            assert!(!found.contains("no alarms"), "{metric}: {found}");
        }
    }
}
