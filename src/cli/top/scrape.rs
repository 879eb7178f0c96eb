//! Fetching `/metrics` and reading Prometheus's text format.
//!
//! Of the format we need samples only: a name, labels, a number. Comments, types and timestamps are skipped, and so is any
//! line that is not as expected, since a page may have other programs' metrics on it. Nothing here panics on any input.
//! Control characters in labels are replaced, so that what is printed cannot steer a terminal.

use std::collections::HashMap;
use std::time::Duration;

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// One sample: its labels and its number.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

impl Sample {
    /// A label's value; empty where it is not there, as the format has it.
    pub fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value)
    }

    fn fits(&self, want: &[(&str, &str)]) -> bool {
        want.iter().all(|(name, value)| self.label(name) == *value)
    }
}

/// What a server said, by metric.
#[derive(Clone, Debug, Default)]
pub struct Scrape(HashMap<String, Vec<Sample>>);

impl Scrape {
    /// Reads a text.
    pub fn parse(text: &str) -> Self {
        let mut all: HashMap<String, Vec<Sample>> = HashMap::new();
        for (name, sample) in text.lines().filter_map(sample) {
            all.entry(name.to_owned()).or_default().push(sample);
        }
        Self(all)
    }

    /// The samples of a metric that have these labels, in the text's order.
    pub fn all<'a>(&'a self, name: &str, want: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> + 'a {
        self.0.get(name).into_iter().flatten().filter(move |sample| sample.fits(want))
    }

    /// Their sum; 0 where there are none.
    pub fn sum(&self, name: &str, want: &[(&str, &str)]) -> f64 {
        // Not `Iterator::sum`, whose empty sum is -0.
        self.all(name, want).fold(0.0, |sum, sample| sum + sample.value)
    }

    /// Whether a pool of ours is in it.
    pub fn has_pools(&self) -> bool {
        self.0.contains_key("pinpool_memory_capacity_bytes")
    }
}

/// A line `name{label="value",...} number`.
fn sample(line: &str) -> Option<(&str, Sample)> {
    let line = line.trim_start();
    let end = line.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))?;
    let (name, mut rest) = line.split_at(end);
    if name.is_empty() {
        return None;
    }
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner.trim_start();
        while !rest.starts_with('}') {
            let (label, value) = rest.split_once('=')?;
            let (value, after) = quoted(value.trim_start().strip_prefix('"')?)?;
            labels.push((label.trim().to_owned(), value));
            let after = after.trim_start();
            rest = after.strip_prefix(',').unwrap_or(after).trim_start();
        }
        rest = &rest[1..];
    }
    // `+Inf`, `-Inf` and `NaN` are read as well.
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, Sample { labels, value }))
}

/// A label's value up to its closing quote, and what follows that.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\u{fffd}'),
                escaped => value.push(escaped),
            },
            c if c.is_control() => value.push('\u{fffd}'),
            c => value.push(c),
        }
    }
    None
}

/// The address in full: `http://` and `/metrics` need not be written.
pub fn address(given: &str) -> Result<String, String> {
    let given = given.trim();
    let rest = match given.split_once("://") {
        Some(("http", rest)) => rest,
        Some((scheme, _)) => {
            return Err(format!("{scheme}: only http is spoken here; use a tunnel or a proxy"));
        }
        None => given,
    };
    if rest.is_empty() || rest.starts_with('/') {
        return Err(format!("{given:?} names no host, such as 127.0.0.1:9185"));
    }
    Ok(match rest.trim_end_matches('/').contains('/') {
        true => format!("http://{rest}"),
        false => format!("http://{}/metrics", rest.trim_end_matches('/')),
    })
}

/// Fetches from one server again and again.
pub struct Source {
    agent: ureq::Agent,
    url: String,
}

impl Source {
    pub fn new(url: String) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            // A proxy for the world outside does not know this machine's own addresses.
            .proxy(None)
            .build();
        Self { agent: config.into(), url }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// What the server says now, or in a few words why there is nothing of ours.
    pub fn fetch(&self) -> Result<Scrape, String> {
        let mut answer = self.agent.get(&self.url).call().map_err(|error| match error {
            ureq::Error::ConnectionFailed => {
                "nobody answers there: the process is gone, or listens elsewhere".to_owned()
            }
            ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {
                "nobody listens there: the process is gone, or listens elsewhere".to_owned()
            }
            ureq::Error::Timeout(_) => format!("no answer within {} s", PATIENCE.as_secs()),
            error => format!("no answer: {error}"),
        })?;
        if answer.status().as_u16() != 200 {
            return Err(format!(
                "the server has no metrics at this address (status {})",
                answer.status().as_u16()
            ));
        }
        let text =
            answer.body_mut().read_to_string().map_err(|error| format!("the answer broke off: {error}"))?;
        let scrape = Scrape::parse(&text);
        if !scrape.has_pools() {
            return Err("the server answers, but has no metrics of pinpool: has it a pool, and a Sampler that feeds the \
                        recorder?"
                .to_owned());
        }
        Ok(scrape)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn samples_are_read() {
        let text = "# HELP a text\n# TYPE a gauge\na 1\nb{x=\"1\",y=\"q\\\"\\\\\\n}, \"} 2.5e3 1700000000\n\nc{} +Inf\nbroken{x=\"1\nnone\n";
        let scrape = Scrape::parse(text);
        assert_eq!(scrape.sum("a", &[]), 1.0);
        let b = scrape.all("b", &[("x", "1")]).next().unwrap();
        assert_eq!((b.label("y"), b.value, b.label("z")), ("q\"\\\u{fffd}}, ", 2500.0, ""));
        assert_eq!(scrape.sum("c", &[]), f64::INFINITY);
        assert_eq!(scrape.0.len(), 3, "{scrape:?}");
        assert_eq!(scrape.all("b", &[("x", "2")]).count(), 0);
    }

    #[test]
    fn labels_cannot_steer_a_terminal() {
        let scrape = Scrape::parse("a{pool=\"\u{1b}[2Jx\"} 1");
        assert_eq!(scrape.all("a", &[]).next().unwrap().label("pool"), "\u{fffd}[2Jx");
    }

    #[test]
    fn addresses_are_completed() {
        for (given, full) in [
            ("127.0.0.1:9185", "http://127.0.0.1:9185/metrics"),
            ("http://host:1/", "http://host:1/metrics"),
            ("http://host:1/other/metrics", "http://host:1/other/metrics"),
            ("[::1]:9185", "http://[::1]:9185/metrics"),
        ] {
            assert_eq!(address(given).as_deref(), Ok(full));
        }
        for wrong in ["", "https://host", "http://", "/metrics", "ftp://x"] {
            assert!(address(wrong).is_err(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(text in ".{0,200}", shaped in "[a-c]{0,2}\\{?([xy]=\"?[^\n]{0,4}\"?,?){0,3}\\}? ?[0-9.eE+-]{0,4}") {
            Scrape::parse(&text);
            Scrape::parse(&shaped);
        }
    }
}
