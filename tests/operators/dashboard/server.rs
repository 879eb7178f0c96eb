//! The example's server within the test's process. Tests of `pinpool top` use this file too.

#[allow(dead_code, reason = "its main is not ours")]
#[path = "../../../examples/dashboard.rs"]
pub mod served;

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use clap::Parser;

use served::{Dashboard, Options, router};

/// A condition that has not come up after this long never will.
pub const PATIENCE: Duration = Duration::from_secs(90);

pub struct Server {
    pub address: SocketAddr,
    pub dashboard: Dashboard,
}

/// The example's server, on a free port, until the process ends: there is one recorder in a process.
pub fn server() -> &'static Server {
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
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// The text at an address.
pub fn get(url: &str) -> String {
    let config =
        ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(20))).proxy(None).build();
    let agent: ureq::Agent = config.into();
    agent.get(url).call().unwrap().body_mut().read_to_string().unwrap()
}
