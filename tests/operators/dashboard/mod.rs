//! The dashboard as an operator meets it: the page in a browser, the metrics, and the rules under promtool. (`pinpool
//! top` has tests beside the command.)
//!
//! The example's server runs within this process, under its load; conditions that it does not reach at once (alarms, a
//! server that ends, hostile names) come from [`fake`] servers. The browser and promtool are real programs, of Debian's
//! packages `chromium` and `prometheus`. Where one is missing its tests say that they were skipped, and fail if
//! `PINPOOL_REQUIRE` names `browser` or `prometheus`.

mod browser;
mod exported;
mod fake;
mod prometheus;
#[allow(dead_code, reason = "its main is not ours")]
#[path = "../../../examples/dashboard.rs"]
mod served;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use clap::Parser;

use crate::support::{doubles, skip};
use served::{Dashboard, Options, router};

/// A condition that has not come up after this long never will.
const PATIENCE: Duration = Duration::from_secs(90);

struct Server {
    address: SocketAddr,
    _dashboard: Dashboard,
}

/// The example's server, on a free port, until the process ends: there is one recorder in a process.
fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let options = ["dashboard", "--capacity", "16", "--interval", "100"];
        let dashboard = Dashboard::start(&Options::parse_from(options)).unwrap();
        let address = fake::serve(router(dashboard.metrics()));
        Server { address, _dashboard: dashboard }
    })
}

impl Server {
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// The text at an address.
fn get(url: &str) -> Result<String, ureq::Error> {
    let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(20))).proxy(None);
    let agent: ureq::Agent = config.build().into();
    agent.get(url).call()?.body_mut().read_to_string()
}

/// The text of a file of the example.
fn example(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap()
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/dashboard").join(name)
}

/// The first of these programs that is in `PATH`. Without it the test is skipped and says so, or fails where
/// `PINPOOL_REQUIRE` names `kind`.
fn program(kind: &str, names: &[&str]) -> Option<Command> {
    let found = names.iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        let why = format!("none of {names:?} is in PATH ({kind})");
        assert!(!doubles::required_device(kind), "PINPOOL_REQUIRE names {kind}: {why}");
        skip!("{why}");
    }
    found.map(Command::new)
}

/// What the program prints, once it has ended well.
fn output(command: &mut Command) -> String {
    let ended = doubles::ended(command, PATIENCE);
    let is_well = ended.status.is_some_and(|status| status.success());
    assert!(is_well, "{command:?} {}: {}{}", ended.how(), ended.stdout, ended.stderr);
    ended.stdout
}
