//! Fetching `/metrics` and reading Prometheus's text format.
//!
//! Of the format `top` needs only samples: a name, two labels, a number. Comments, types,
//! timestamps, metrics of other programs and malformed lines are skipped. A server may send too
//! much, so the bytes read and the time of a fetch are bounded, and the work is linear in the
//! answer. The values of labels are escaped here, so that printed text cannot steer a terminal.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::super::escape::clean;

/// How long one fetch may take: connecting, and the answer.
const FETCH_TIMEOUT: Duration = Duration::from_secs(3);
/// The most bytes of an answer.
const LARGEST_ANSWER: u64 = 10 << 20;
/// The most characters of a label's value: a pool's name has 103, and 21 for its number.
const LONGEST_LABEL: usize = 124;
/// The most characters of an error.
const LONGEST_ERROR: usize = 300;

/// The labels that tell a metric's samples apart. Each of pinpool's metrics has at most one.
const PART_LABELS: [&str; 7] = ["state", "stride", "class", "reason", "direction", "stream", "le"];

/// A pool's or a device's samples of a metric, by the value of the other label, or empty.
type OwnerSamples = BTreeMap<Box<str>, f64>;

/// One answer of a server: samples by metric, and then by pool or device (the *owner*).
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    metrics: HashMap<Box<str>, BTreeMap<Box<str>, OwnerSamples>>,
    samples: usize,
}

impl Scrape {
    pub fn parse(text: &str) -> Self {
        let mut all = Self::default();
        for (name, owner, part, value) in text.lines().filter_map(sample) {
            all.samples += 1;
            // Samples that differ only in other labels are added up.
            let parts = all.metrics.entry(name.into()).or_default().entry(owner).or_default();
            *parts.entry(part).or_insert(0.0) += value;
        }
        all
    }

    /// The number of samples.
    pub fn len(&self) -> usize {
        self.samples
    }

    /// The samples of a metric, each with its pool or device and with its part, in their order.
    pub fn all(&self, name: &str) -> Vec<(&str, &str, f64)> {
        let owners = self.metrics.get(name).into_iter().flatten();
        owners
            .flat_map(|(owner, parts)| parts.iter().map(|(part, value)| (&**owner, &**part, *value)))
            .collect()
    }

    /// A metric's samples of one pool or device, each with its part.
    pub fn of<'a>(&'a self, name: &str, owner: &str) -> impl Iterator<Item = (&'a str, f64)> + use<'a> {
        let parts = self.metrics.get(name).and_then(|owners| owners.get(owner));
        parts.into_iter().flatten().map(|(part, value)| (&**part, *value))
    }

    /// The sample of one part.
    pub fn get(&self, name: &str, owner: &str, part: &str) -> Option<f64> {
        self.metrics.get(name)?.get(owner)?.get(part).copied()
    }

    /// The sum of an owner's samples, or the sample of one part; 0 where there is none.
    pub fn sum(&self, name: &str, owner: &str, part: Option<&str>) -> f64 {
        match part {
            Some(part) => self.get(name, owner, part).unwrap_or(0.0),
            // Not `Iterator::sum`, which returns -0 for no samples.
            None => self.of(name, owner).fold(0.0, |sum, (_, value)| sum + value),
        }
    }
}

/// Parses `name{label="value",...} number` of pinpool: name, pool or device, part, number.
///
/// Existing parsers do not fit: `prometheus-parse` cuts labels at commas and braces within their
/// quotes, others refuse the whole answer for one malformed line.
fn sample(line: &str) -> Option<(&str, Box<str>, Box<str>, f64)> {
    let line = line.trim_start();
    let end = line.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))?;
    let (name, mut rest) = line.split_at(end);
    if !name.starts_with("pinpool_") && name != "server_link_peak_bytes_per_second" {
        return None;
    }
    let (mut owner, mut part): (Option<Box<str>>, Option<Box<str>>) = (None, None);
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner.trim_start();
        while !rest.starts_with('}') {
            let (label, value) = rest.split_once('=')?;
            let (value, after) = quoted(value.trim_start().strip_prefix('"')?)?;
            match label.trim() {
                "pool" | "device" => owner = Some(value.into()),
                label if PART_LABELS.contains(&label) => part = Some(value.into()),
                _ => {}
            }
            let after = after.trim_start();
            rest = after.strip_prefix(',').unwrap_or(after).trim_start();
        }
        rest = &rest[1..];
    }
    // `f64` parses `+Inf`, `-Inf` and `NaN` as well.
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, owner.unwrap_or_default(), part.unwrap_or_default(), value))
}

/// A label's value up to its closing quote, escaped for printing, and the text behind it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        let c = match c {
            '"' => return Some((clean(&value, LONGEST_LABEL).into_owned(), &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => '\n',
                escaped => escaped,
            },
            c => c,
        };
        // The value is cut to `LONGEST_LABEL` characters of at most four bytes: no more is kept.
        if value.len() <= 4 * LONGEST_LABEL {
            value.push(c);
        }
    }
    None
}

/// A server that is fetched from again and again, and its connections.
pub struct Server {
    agent: ureq::Agent,
    /// The address, which has no characters that steer a terminal.
    pub url: String,
}

impl Server {
    /// `http://` and `/metrics` may be left out of the address.
    pub fn new(given: &str) -> Result<Self, String> {
        let full = if given.contains("://") { given.to_owned() } else { format!("http://{given}") };
        let uri: ureq::http::Uri = full.parse().map_err(|error| format!("{given:?}: {error}"))?;
        let (Some("http"), Some(host)) = (uri.scheme_str(), uri.authority()) else {
            return Err(format!("{given:?}: only http is supported; use a tunnel or a proxy"));
        };
        let url = if uri.path() == "/" { format!("http://{host}/metrics") } else { full };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // A proxy for outside addresses does not know the addresses of this machine.
            .proxy(None)
            .build();
        Ok(Self { agent: config.into(), url })
    }

    /// Fetches and parses an answer. The error is one short text that may be printed.
    pub fn fetch(&self) -> Result<Scrape, String> {
        self.answer().map_err(|why| clean(&why, LONGEST_ERROR).into_owned())
    }

    fn answer(&self) -> Result<Scrape, String> {
        let request = self.agent.get(&self.url).config().timeout_global(Some(FETCH_TIMEOUT)).build();
        let told = |error: ureq::Error| match error {
            ureq::Error::ConnectionFailed => {
                "no answer at this address: the process has ended, or listens elsewhere".to_owned()
            }
            ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {
                "no process listens there: it has ended, or listens elsewhere".to_owned()
            }
            ureq::Error::Timeout(_) => format!("no whole answer within {} s", FETCH_TIMEOUT.as_secs()),
            ureq::Error::BodyExceedsLimit(_) => format!("the answer has more than {LARGEST_ANSWER} bytes"),
            error => format!("no answer: {error}"),
        };
        let mut answer = request.call().map_err(told)?;
        let status = answer.status().as_u16();
        if status != 200 {
            return Err(format!("the server has no metrics at this address (status {status})"));
        }
        let text = answer.body_mut().with_config().limit(LARGEST_ANSWER).read_to_string().map_err(told)?;
        let scrape = Scrape::parse(&text);
        if !scrape.metrics.contains_key("pinpool_memory_capacity_bytes") {
            let why = "does it have a pool, and a Sampler that feeds the recorder?";
            return Err(format!("the server answers, but has no metrics of pinpool: {why}"));
        }
        Ok(scrape)
    }
}
