//! What `top` shows: rates, quantiles and alarms, from a server's answers of the last minutes.
//!
//! A [`History`] keeps the answers, and [`History::page`] makes text of them. The page of
//! `examples/dashboard` shows the same, from the same metrics.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::super::amount::Amount;
use super::scrape::Scrape;

/// The time that a rate is computed over.
const RATE: Duration = Duration::from_secs(5);
/// The time that quantiles, and alarms about events, are computed over.
const RECENT: Duration = Duration::from_secs(60);
/// How long an answer is kept: a little longer than [`RECENT`].
const KEEP: Duration = Duration::from_secs(70);
/// The most samples kept in all; ten thousand take a few megabytes.
const KEPT: usize = 500_000;
/// The most pools, and the most devices, that are shown: a server with more is broken or hostile.
const SHOWN: usize = 50;
/// The most alarms that are shown.
const ROWS: usize = 100;
/// The most size classes of a pool that are shown: those of which most bytes are out.
const CLASSES: usize = 10;
/// The states of memory.
const STATES: [&str; 5] = ["checked_out", "in_flight", "quarantined", "cut", "free"];
/// The metric with the time at which the server's sampler last sampled a pool.
const SAMPLED: &str = "pinpool_sampled_timestamp_seconds";

/// A server's answers of the last minutes.
#[derive(Debug, Default)]
pub struct History {
    scrapes: VecDeque<(Instant, Scrape)>,
    /// Why the last fetch failed, if it did.
    pub trouble: Option<String>,
}

impl History {
    /// Whether nothing was fetched yet.
    pub fn is_empty(&self) -> bool {
        self.scrapes.is_empty() && self.trouble.is_none()
    }

    /// Adds the result of a fetch.
    pub fn add(&mut self, at: Instant, result: Result<Scrape, String>) {
        let scrape = match result {
            Ok(scrape) => scrape,
            Err(why) => return self.trouble = Some(why),
        };
        self.trouble = None;
        self.scrapes.push_back((at, scrape));
        // At least two answers stay, however long the interval is.
        let too_old = |old: &(Instant, Scrape)| at.saturating_duration_since(old.0) > KEEP;
        let mut kept: usize = self.scrapes.iter().map(|(_, scrape)| scrape.len()).sum();
        while self.scrapes.len() > 2 && (kept > KEPT || self.scrapes.front().is_some_and(too_old)) {
            kept -= self.scrapes.pop_front().map_or(0, |(_, scrape)| scrape.len());
        }
    }

    /// Everything to show: alarms, devices, each pool. Before the first answer: why there is none.
    pub fn page(&self, now: Instant) -> String {
        let Some((at, scrape)) = self.scrapes.back() else {
            let why = self.trouble.as_ref().map(|why| format!("ALARM: {why}\n"));
            return why.unwrap_or_else(|| "waiting for the first answer\n".into());
        };
        let mut pools = scrape.all("pinpool_memory_capacity_bytes");
        // An exporter keeps the last values of a pool that no longer exists: they are 0.
        pools.retain(|(_, _, capacity)| *capacity != 0.0);
        let devices = scrape.all("pinpool_device_lost");
        let (mut page, mut alarms) = (String::new(), Vec::new());
        if let Some(why) = &self.trouble {
            let age = now.saturating_duration_since(*at).as_secs();
            alarms.push(format!("ALARM: stale: {why}; what is shown is {age} s old"));
        }
        for (device, _, lost) in devices.iter().take(SHOWN) {
            if *lost > 0.0 {
                alarms.push(format!("ALARM: {device} is lost: restart the process"));
            }
            let stuck = scrape.sum("pinpool_device_stuck_streams", device, None);
            if stuck > 0.0 {
                let why = "a kernel or copy hangs";
                alarms.push(format!("ALARM: {device}: streams that get nothing done: {stuck}; {why}"));
            }
        }
        for (pool, _, capacity) in pools.iter().take(SHOWN) {
            self.pool_alarms(scrape, pool, *capacity, &mut alarms);
        }
        page.extend(alarms.iter().take(ROWS).map(|alarm| format!("{alarm}\n")));
        if alarms.is_empty() {
            page += "no alarms\n";
        }
        more(alarms.len(), ROWS, "alarms", &mut page);
        more(devices.len(), SHOWN, "devices", &mut page);
        more(pools.len(), SHOWN, "pools", &mut page);
        self.devices(scrape, &mut page);
        for (pool, _, capacity) in pools.iter().take(SHOWN) {
            self.pool(scrape, pool, *capacity, &mut page);
        }
        page
    }

    /// The youngest answer that is at least `age` older than the last one, else the oldest, and the
    /// seconds between the two. `None`: there is only one answer.
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

    /// An upper bound of a quantile of the last minute's values, or of all with one answer.
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

    fn pool_alarms(&self, scrape: &Scrape, pool: &str, capacity: f64, alarms: &mut Vec<String>) {
        let of = |name: &str| scrape.sum(name, pool, None);
        let state = |state: &str| scrape.sum("pinpool_memory_bytes", pool, Some(state));
        // By how much a counter rose in a minute, or in the time that the history covers.
        let recent = |name: &str| self.since(RECENT, name, pool, None).map_or(0.0, |(count, _)| count);
        let seconds = self.before(RECENT).map_or(0.0, |(seconds, _)| seconds.max(1.0));
        let lately = format!("in the last {seconds:.0} s");
        let mut note = |is_bad: bool, level: &str, text: String| {
            if is_bad {
                alarms.push(format!("{level}: {pool}: {text}"));
            }
        };
        let idle = of(SAMPLED) > 0.0 && seconds >= RECENT.as_secs_f64() && recent(SAMPLED) == 0.0;
        note(idle, "ALARM", format!("stale, not sampled {lately}: the sampler has ended"));
        let used = of("pinpool_memory_bytes") - state("free");
        let (share, fix) = (percent(used, capacity), "raise the capacity, or find what keeps buffers");
        note(used > 0.9 * capacity, "warning", format!("nearly full, {share} in use: {fix}"));
        for (metric, level, what) in [
            ("pinpool_timeouts_total", "ALARM", "waits for memory timed out"),
            ("pinpool_waits_total", "warning", "requests that had to wait for memory"),
            ("pinpool_refused_total", "warning", "checkouts refused"),
            ("pinpool_growth_failures_total", "ALARM", "pinning ended early (pinpool doctor says why)"),
        ] {
            let count = recent(metric);
            note(count > 0.0, level, format!("{what} {lately}: {count}"));
        }
        let quarantined = bytes(state("quarantined"));
        let text = format!("{quarantined} are quarantined: unusable until the process ends");
        note(state("quarantined") > 0.0, "ALARM", text);
        let (stuck, size) = (of("pinpool_stuck_buffers"), bytes(of("pinpool_stuck_bytes")));
        let log = "the log names them: pinpool::pool::stuck";
        note(stuck > 0.0, "ALARM", format!("buffers out for too long: {stuck} ({size}); {log}"));
        let (unpinned, fix) =
            (of("pinpool_memory_unpinned_bytes"), "raise the memlock limit, pinpool doctor says how");
        note(unpinned > 0.0, "warning", format!("{} are not pinned: {fix}", bytes(unpinned)));
    }

    fn pool(&self, scrape: &Scrape, pool: &str, capacity: f64, page: &mut String) {
        let of = |name: &str| scrape.sum(name, pool, None);
        let rate = |name: &str| self.rate(name, pool, None);
        let state = |state: &str| scrape.sum("pinpool_memory_bytes", pool, Some(state));
        let held = of("pinpool_memory_bytes");
        let used = held - state("free");
        let (size, share) = (bytes(capacity), percent(used, capacity));
        *page += &format!("\nPool {pool}: {} of {size} in use ({share})\n", bytes(used));
        let row = |name: &str, size: f64| [name.replace('_', " "), bytes(size), percent(size, capacity)];
        let mut rows = STATES.map(|name| row(name, state(name))).to_vec();
        rows.push(row("not taken from the system", (capacity - held).max(0.0)));
        table(["memory", "bytes", "of capacity"], &rows, page);

        let counted = |name: &str| format!("{}, {} in all", per(rate(name)), of(name));
        let hits = rate("pinpool_checkouts_total").zip(rate("pinpool_misses_total"));
        let hits = hits.map(|(all, misses)| percent((all - misses).max(0.0), all));
        let reasons = scrape.of("pinpool_refused_total", pool).filter(|(_, count)| *count > 0.0);
        let reason = reasons.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(reason, _)| reason.replace('_', " "));
        let rows = [
            ("requests waiting now", of("pinpool_waiting_requests").to_string()),
            ("waits", counted("pinpool_waits_total")),
            ("timed out", counted("pinpool_timeouts_total")),
            ("refused", counted("pinpool_refused_total")),
            ("refused most for", shown(reason)),
            ("99% of the waits", time(self.quantile(0.99, "pinpool_wait_seconds", pool))),
            ("99% of buffers held for", time(self.quantile(0.99, "pinpool_holding_seconds", pool))),
            ("checkouts", per(rate("pinpool_checkouts_total"))),
            ("from the thread's own cache", shown(hits)),
            ("pinned", bytes(of("pinpool_memory_pinned_bytes"))),
        ];
        table(["use", ""], &rows.map(|(name, value)| [name.to_owned(), value]), page);

        // Those of which most bytes are out come first.
        let size = |(stride, out): &(&str, f64)| out * stride.parse().unwrap_or(f64::MAX);
        let mut classes: Vec<(&str, f64)> = scrape.of("pinpool_class_out_segments", pool).collect();
        classes.sort_by(|a, b| size(b).total_cmp(&size(a)));
        let row = |(stride, out): &(&str, f64)| {
            let of = |name: &str| scrape.sum(name, pool, Some(stride)).to_string();
            let [free, cached] = [of("pinpool_class_free_segments"), of("pinpool_class_cached_segments")];
            let checkouts = self.rate("pinpool_class_checkouts_total", pool, Some(stride));
            [stride.parse().map_or("larger".into(), bytes), out.to_string(), free, cached, per(checkouts)]
        };
        let rows: Vec<_> = classes.iter().take(CLASSES).map(row).collect();
        table(["classes", "out", "free", "kept by threads", "checkouts"], &rows, page);
        more(classes.len(), CLASSES, "classes", page);
    }

    fn devices(&self, scrape: &Scrape, page: &mut String) {
        let mut rows = Vec::new();
        for (device, ..) in scrape.all("pinpool_device_lost").iter().take(SHOWN) {
            for direction in ["upload", "download"] {
                let speed = self.rate("pinpool_device_copied_bytes_total", device, Some(direction));
                // The link's peak is known only if the server exports it.
                let peak = scrape.get("server_link_peak_bytes_per_second", device, direction);
                rows.push([
                    format!("{device} {direction}"),
                    shown(speed.map(|speed| format!("{:.2} GB/s", speed / 1e9))),
                    shown(peak.zip(speed).map(|(peak, speed)| percent(speed, peak))),
                    time(self.quantile(0.99, "pinpool_flight_seconds", device)),
                    scrape.sum("pinpool_device_errors_total", device, None).to_string(),
                ]);
            }
        }
        table(["devices", "speed", "of peak", "99% of flights", "errors"], &rows, page);
    }
}

/// Adds a table of a name and values in each row.
fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]], page: &mut String) {
    *page += "\n";
    for row in [heads.map(str::to_owned)].iter().chain(rows) {
        let values: String = row[1..].iter().map(|value| format!("{value:>18}")).collect();
        *page += format!("{:<28}{values}", row[0]).trim_end();
        *page += "\n";
    }
}

/// Adds a line with the number of rows that are not shown, if there are any.
fn more(count: usize, shown: usize, what: &str, page: &mut String) {
    if let Some(more @ 1..) = count.checked_sub(shown) {
        *page += &format!("warning: {more} more {what} are not shown\n");
    }
}

/// Bytes of a metric, which a server may give as anything.
fn bytes(n: f64) -> String {
    Amount(n as u64).to_string()
}

fn shown(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}

fn per(rate: Option<f64>) -> String {
    shown(rate.map(|rate| format!("{rate:.1}/s")))
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.0}%", 100.0 * part / whole) } else { "-".into() }
}

/// A bound of a histogram.
fn time(seconds: Option<f64>) -> String {
    let Some(seconds) = seconds else { return "none".into() };
    let finite = Duration::try_from_secs_f64(seconds);
    finite.map_or("over 1,000 s".into(), |time| format!("<= {time:.1?}"))
}
