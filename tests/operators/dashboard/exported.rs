//! Every metric that a dashboard, a rule, the page or `pinpool top` names is one that the server exports.

use std::collections::BTreeSet;
use std::time::Instant;

use pinpool::telemetry::METRICS;

use super::{PATIENCE, example, get, server};

/// The names in a text that begin as the crate's metrics do, without the endings of histograms.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = words.filter(|word| word.starts_with("pinpool_") || word.starts_with("server_link_"));
    ours.map(|word| word.trim_end_matches("_bucket").to_owned()).collect()
}

/// What the server exports, once everything that it ever will has been counted: histograms begin with their first
/// value.
fn exported() -> BTreeSet<String> {
    let start = Instant::now();
    loop {
        let text = get(&server().url("/metrics")).unwrap();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let names: BTreeSet<String> = types.map(str::to_owned).collect();
        let all = METRICS.iter().map(|metric| metric.prometheus_name());
        let missing: Vec<String> = all.filter(|name| !names.contains(name)).collect();
        if missing.is_empty() {
            return names;
        }
        assert!(start.elapsed() < PATIENCE, "never exported: {missing:?}");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
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

/// An exporter's timeout for idle metrics holds for all of the process: it takes what a server counts rarely, and what it
/// sets once, such as the link's peak.
#[test]
fn no_example_takes_the_servers_own_metrics_away() {
    for file in ["examples/dashboard.rs", "examples/candle/src/server.rs"] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        // The package that is published has not all examples.
        let Ok(text) = std::fs::read_to_string(path) else { continue };
        assert!(text.contains("PrometheusBuilder::new()") && !text.contains(".idle_timeout("), "{file}");
    }
}

#[test]
fn the_grafana_dashboard_is_well_formed() {
    let dashboard: serde_json::Value = serde_json::from_str(&example("grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "ids are unique");
    let mut taken = BTreeSet::new();
    for panel in panels {
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
        for x in at("x")..at("x") + at("w") {
            let mut cells = (at("y")..at("y") + at("h")).map(|y| (x, y));
            assert!(cells.all(|cell| taken.insert(cell)), "{} lies upon another", panel["title"]);
        }
        let asks = panel["targets"].as_array().is_some_and(|targets| !targets.is_empty());
        assert!(panel["type"] == "row" || asks, "{}", panel["title"]);
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
