//! The metrics in a real Prometheus, and the rules under promtool.

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::Value;

use super::{PATIENCE, example, get, output, path, program, server};

#[test]
fn the_rules_are_well_formed_and_fire_when_they_should_and_not_else() {
    for args in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let Some(mut promtool) = program("prometheus", &["promtool"]) else { return };
        let said = output(promtool.args(args).current_dir(path("")));
        assert!(said.contains("SUCCESS"), "{said}");
    }
}

#[test]
fn every_rule_is_tried() {
    let (rules, tests) = (example("alerts.yml"), example("alerts_test.yml"));
    let names: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() > 10);
    for name in names {
        let fires = format!("- alertname: {name}\n");
        let is_quiet = format!("{{alertname: {name}, eval_time: 25m, exp_alerts: []}}");
        assert!(tests.contains(&fires) && tests.contains(&is_quiet), "{name} is not seen in both states");
    }
}

/// A Prometheus that scrapes the server, until it is dropped.
struct Prometheus {
    child: Child,
    url: String,
    folder: tempfile::TempDir,
}

impl Prometheus {
    fn start() -> Option<Self> {
        let mut program = program("prometheus", &["prometheus"])?;
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}\nrule_files: [{}]\nscrape_configs:\n  \
             - {{job_name: pinpool, static_configs: [{{targets: [\"{}\"]}}]}}\n",
            path("alerts.yml").display(),
            server().address
        );
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, config).unwrap();
        // It takes no port 0. Should another process take this one meanwhile, it ends, and says so.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let child = program
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let started = Self { child, url: format!("http://127.0.0.1:{port}"), folder };
        started.until("it is ready", |p| get(&format!("{}/-/ready", p.url)).ok());
        Some(started)
    }

    /// Asks again and again until there is an answer.
    fn until<R>(&self, what: &str, mut ask: impl FnMut(&Self) -> Option<R>) -> R {
        let start = Instant::now();
        loop {
            if let Some(answer) = ask(self) {
                return answer;
            }
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            assert!(start.elapsed() < PATIENCE, "not {what}:\n{}", log());
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
    }

    fn ask(&self, what: &str) -> Value {
        serde_json::from_str(&get(&format!("{}/api/v1/{what}", self.url)).unwrap()).unwrap()
    }

    fn query(&self, expr: &str) -> Vec<Value> {
        let encoded: String = expr.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer: Value = self.ask(&format!("query?query={encoded}"));
        assert_eq!(answer["status"], "success", "{expr}: {answer}");
        answer["data"]["result"].as_array().unwrap().clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The dashboard's queries, with Grafana's variables filled in.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&example("grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let fill = |expr: &str| {
        expr.replace("$__rate_interval", "20s").replace("$instance", ".*").replace("$pool", ".*")
    };
    targets.map(|target| fill(target["expr"].as_str().unwrap())).collect()
}

#[test]
fn a_prometheus_has_all_that_the_dashboard_asks_for() {
    let Some(prometheus) = Prometheus::start() else { return };
    let queries = queries();
    assert!(queries.len() > 30 && queries.iter().all(|query| !query.contains('$')), "{queries:#?}");
    let mut missing = queries;
    prometheus.until("every query has an answer", |p| {
        missing.retain(|query| p.query(query).is_empty());
        eprintln!("no answer yet: {missing:?}");
        missing.is_empty().then_some(())
    });
    // A number that the test can compare: no more checkouts than the pool has counted.
    let seen = prometheus.query("pinpool_checkouts_total");
    let seen: f64 = seen[0]["value"][1].as_str().unwrap().parse().unwrap();
    assert!(seen > 0.0 && seen <= server().dashboard.pool.stats().checkouts as f64, "{seen}");

    let rules = prometheus.ask("rules");
    let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() > 10 && rules.iter().all(|rule| rule["health"] == "ok"), "{rules:#?}");
    // Bursts of the load make waits time out. (An alert fires after minutes of that.)
    prometheus.until("an alert about timeouts is pending", |p| {
        let pending = p.query("ALERTS{alertname=\"PinpoolTimeouts\",pool=\"serving\"}");
        (!pending.is_empty()).then_some(())
    });
}
