//! A server that gives a test's answers, and records the paths that it was asked for.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::http::{StatusCode, Uri, header};

/// What a healthy pool of 100 MiB exports: 20 free, 80 out. `POOL` is its name.
const HEALTHY: &str = include_str!("healthy.prom");

/// Lines of a pool and a device that an operator has to act on, or, of a counter, their rise.
pub const CONDITIONS: [&str; 9] = [
    "pinpool_memory_bytes{pool=\"p\",state=\"quarantined\"} 15728640",
    "pinpool_stuck_buffers{pool=\"p\"} 3",
    "pinpool_memory_unpinned_bytes{pool=\"p\"} 4096",
    "pinpool_device_lost{device=\"cuda:0\"} 1",
    "pinpool_device_stuck_streams{device=\"cuda:0\"} 2",
    "pinpool_timeouts_total{pool=\"p\"} 4",
    "pinpool_refused_total{pool=\"p\",reason=\"queue_full\"} 3",
    "pinpool_growth_failures_total{pool=\"p\"} 1",
    "pinpool_waits_total{pool=\"p\"} 5",
];

/// Serves on a free port until the process ends.
pub fn serve(router: Router) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
    });
    address
}

pub struct Fake {
    pub address: SocketAddr,
    /// The paths that were asked for, in order.
    pub asked: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    /// `/` is the page; `/metrics` is what `answer` makes of the number of times that it was asked
    /// for, from 0.
    pub fn start(answer: impl Fn(u32) -> (u16, String) + Send + Sync + 'static) -> Self {
        let page = include_str!("../../../examples/dashboard/page.html");
        let (asked, count) = (Arc::<Mutex<Vec<String>>>::default(), AtomicU32::new(0));
        let paths = asked.clone();
        let answer = Arc::new(move |path: &str| {
            paths.lock().unwrap().push(path.to_owned());
            let (code, kind, body) = match path {
                "/" => (200, "text/html; charset=utf-8", page.to_owned()),
                "/metrics" => {
                    let (code, text) = answer(count.fetch_add(1, Ordering::Relaxed));
                    (code, "text/plain", text)
                }
                _ => (404, "text/plain", String::new()),
            };
            (StatusCode::from_u16(code).unwrap(), [(header::CONTENT_TYPE, kind)], body)
        });
        let answered = move |uri: Uri| std::future::ready(answer(uri.path()));
        Self { address: serve(Router::new().fallback(answered)), asked }
    }

    /// The same text always.
    pub fn saying(text: String) -> Self {
        Self::start(move |_| (200, text.clone()))
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// [`HEALTHY`] with a name, and lines of the test's own in place of those of the same names.
pub fn pool(name: &str, instead: &[&str]) -> String {
    let key = |line: &str| line.rsplit_once(' ').map(|(key, _)| key.to_owned());
    let healthy = HEALTHY.replace("POOL", name);
    let kept = healthy.lines().filter(|line| !instead.iter().any(|other| key(other) == key(line)));
    kept.chain(instead.iter().copied()).map(|line| format!("{line}\n")).collect()
}
