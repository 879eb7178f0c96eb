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
        let options = ["dashboard", "--listen", "127.0.0.1:0", "--capacity", "16", "--interval", "100"];
        let options = Options::parse_from(options);
        let dashboard = Dashboard::start(&options).unwrap();
        let listener = std::net::TcpListener::bind(options.listen).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (address, metrics) = (listener.local_addr().unwrap(), dashboard.metrics());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, router(metrics)).await.unwrap();
            });
        });
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
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |name: &&&str| std::env::split_paths(&folders).any(|folder| folder.join(name).is_file());
    let found = names.iter().find(is_there);
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
