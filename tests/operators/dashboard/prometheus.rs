//! The rules, and the queries of the Grafana dashboard, under promtool.

use serde_json::Value;

use super::{example, output, path, program};

#[test]
fn the_rules_are_well_formed_and_fire_when_they_should_and_not_else() {
    for args in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let Some(mut promtool) = program("prometheus", &["promtool"]) else { return };
        let said = output(promtool.args(args).current_dir(path("")));
        assert!(said.contains("SUCCESS"), "{said}");
    }
}

/// Each as a rule that records it, with Grafana's variables filled in. (That its metrics are there is in `exported`.)
#[test]
fn the_dashboards_queries_are_well_formed() {
    let Some(mut promtool) = program("prometheus", &["promtool"]) else { return };
    let dashboard: Value = serde_json::from_str(&example("grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let rules: Vec<Value> = (0..)
        .zip(targets)
        .map(|(n, target)| {
            let expr = target["expr"].as_str().unwrap();
            let filled = expr.replace("$__rate_interval", "20s").replace("$instance", ".*");
            serde_json::json!({ "record": format!("query:{n}"), "expr": filled.replace("$pool", ".*") })
        })
        .collect();
    assert!(rules.len() > 30);
    let all = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), all.to_string()).unwrap();
    let said = output(promtool.args(["check", "rules"]).arg(file.path()));
    assert!(said.contains("SUCCESS"), "{said}");
}
