//! The dashboard as an operator meets it: the page in a browser, the metrics in a Prometheus, and `pinpool top`.
//!
//! The example's server runs within this process, under its load; conditions that it does not reach at once (alarms, a
//! server that ends, hostile names) come from [`fake`] servers. The browser and Prometheus are real programs, Debian's
//! packages `chromium` and `prometheus`. Where one is missing its tests say that they were skipped, and fail if
//! `PINPOOL_REQUIRE` names `browser` or `prometheus`. Screenshots are left in `target/tmp/dashboard`.

#![cfg(all(feature = "metrics", target_os = "linux"))]

mod browser;
#[cfg(feature = "cli")]
#[allow(dead_code, reason = "top escapes labels only")]
#[path = "../../../src/escape.rs"]
mod escape;
mod exported;
mod fake;
#[cfg(feature = "cli")]
mod history;
mod programs;
mod prometheus;
#[allow(dead_code, reason = "its main is not ours")]
#[path = "../../../examples/dashboard.rs"]
mod served;
#[cfg(feature = "cli")]
mod top;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use clap::Parser;

use served::{Dashboard, Options, router};

/// A condition that has not come up after this long never will.
const PATIENCE: Duration = Duration::from_secs(90);

struct Server {
    address: SocketAddr,
    dashboard: Dashboard,
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
        Server { address, dashboard }
    })
}

impl Server {
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// The text at an address.
fn get(url: &str) -> String {
    let config =
        ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(20))).proxy(None).build();
    let agent: ureq::Agent = config.into();
    agent.get(url).call().unwrap().body_mut().read_to_string().unwrap()
}

/// A file of the example.
fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/dashboard").join(name)
}

/// Browsers and the like are heavy: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
