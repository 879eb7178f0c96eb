//! Every metric that a dashboard, a rule, the page or `pinpool top` names is one that the server exports.

use std::collections::BTreeSet;

use pinpool::telemetry::METRICS;

use super::{example, get, server};
use crate::support::until;

/// The names in a text that begin as the crate's metrics do, without the endings of histograms.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = words.filter(|word| word.starts_with("pinpool_") || word.starts_with("server_link_"));
    ours.map(|word| word.trim_end_matches("_bucket").to_owned()).collect()
}

/// What the server exports, once everything that it ever will has been counted: histograms begin with their first
/// value.
fn exported() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let all = METRICS.iter().map(|metric| metric.name.replace('.', "_"));
    for metric in all {
        until(&format!("{metric} is exported"), || {
            let text = get(&server().url("/metrics")).unwrap();
            let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
            names = types.map(str::to_owned).collect();
            names.contains(&metric)
        });
    }
    names
}

#[test]
fn what_the_files_name_is_exported() {
    let exported = exported();
    let files = [
        ("grafana.json", example("grafana.json"), 25),
        ("alerts.yml", example("alerts.yml"), 11),
        ("alerts_test.yml", example("alerts_test.yml"), 11),
        ("page.html", example("page.html"), 20),
        ("top", include_str!("../../../crates/pinpool-cli/src/cli/top/view.rs").to_owned(), 20),
    ];
    for (file, text, least) in files {
        let names = named(&text);
        assert!(names.len() >= least, "{file} names too few: {names:?}");
        let unknown: Vec<_> = names.difference(&exported).collect();
        assert!(unknown.is_empty(), "{file} names what the server does not export: {unknown:?}");
    }
}

#[test]
fn the_page_needs_nothing_from_outside() {
    let page = get(&server().url("/")).unwrap();
    assert_eq!(page, example("page.html"));
    assert!(page.contains("@media (prefers-color-scheme: dark)"), "light or dark as the system is");
    let addresses = page.matches("://").count();
    // The name of SVG's namespace, which is never fetched.
    assert_eq!(addresses, page.matches("http://www.w3.org/2000/svg").count(), "an address of another server");
    for outside in [" src=", "@import", "url(", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval("] {
        assert!(!page.contains(outside), "{outside}");
    }
}
