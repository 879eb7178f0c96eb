//! A server that gives a test's answers, and records the paths that it was asked for.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What a healthy pool of 100 MiB exports: 20 free, 80 out. `POOL` is its name.
pub const HEALTHY: &str = "\
pinpool_memory_capacity_bytes{pool=\"POOL\"} 104857600
pinpool_memory_pinned_bytes{pool=\"POOL\"} 104857600
pinpool_memory_unpinned_bytes{pool=\"POOL\"} 0
pinpool_memory_bytes{pool=\"POOL\",state=\"free\"} 20971520
pinpool_memory_bytes{pool=\"POOL\",state=\"checked_out\"} 52428800
pinpool_memory_bytes{pool=\"POOL\",state=\"in_flight\"} 31457280
pinpool_memory_bytes{pool=\"POOL\",state=\"quarantined\"} 0
pinpool_class_out_segments{pool=\"POOL\",stride=\"65600\"} 3
pinpool_class_free_segments{pool=\"POOL\",stride=\"65600\"} 5
pinpool_class_out_segments{pool=\"POOL\",stride=\"large\"} 1
pinpool_device_lost{device=\"cuda:0\"} 0
pinpool_stream_in_flight_entries{device=\"cuda:0\",stream=\"7\"} 12
pinpool_stream_in_flight_bytes{device=\"cuda:0\",stream=\"7\"} 31457280
server_link_peak_bytes_per_second{device=\"cuda:0\",direction=\"upload\"} 50000000000
";

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

type Answer = dyn Fn(u32) -> (u16, String) + Send + Sync;

pub struct Fake {
    pub address: SocketAddr,
    /// The paths that were asked for, in order.
    pub asked: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
}

impl Fake {
    /// `/` is the page; `/metrics` is what `answer` makes of the number of times that it was asked for, from 0.
    pub fn start(answer: impl Fn(u32) -> (u16, String) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake =
            Self { address: listener.local_addr().unwrap(), asked: Arc::default(), stop: Arc::default() };
        let (asked, stop) = (fake.asked.clone(), fake.stop.clone());
        let answer: Arc<Answer> = Arc::new(answer);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (asked, answer) = (asked.clone(), answer.clone());
                // Browsers open connections ahead and leave them idle.
                std::thread::spawn(move || serve(stream, &asked, &*answer));
            }
        });
        fake
    }

    /// The same text always.
    pub fn saying(text: String) -> Self {
        Self::start(move |_| (200, text.clone()))
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the listener, which then sees the flag. It may have ended already.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(mut stream: TcpStream, asked: &Mutex<Vec<String>>, answer: &Answer) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    while lines.next().is_some_and(|line| !line.is_empty()) {}
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let before = {
        let mut asked = asked.lock().unwrap();
        asked.push(path.clone());
        asked.iter().filter(|p| **p == path).count() - 1
    };
    let (status, kind, body) = match path.as_str() {
        "/" => (
            200,
            "text/html; charset=utf-8",
            include_str!("../../../examples/dashboard/page.html").to_owned(),
        ),
        "/metrics" => {
            let (status, text) = answer(before as u32);
            (status, "text/plain", text)
        }
        _ => (404, "text/plain", String::new()),
    };
    let head = format!("HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n", body.len());
    // The client may have closed the connection.
    let _ = stream.write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes());
}

/// [`HEALTHY`] with a name, and lines of the test's own in place of those of the same names.
pub fn pool(name: &str, instead: &[&str]) -> String {
    let key = |line: &str| line.rsplit_once(' ').map(|(key, _)| key.to_owned());
    let healthy = HEALTHY.replace("POOL", name);
    let kept = healthy.lines().filter(|line| !instead.iter().any(|other| key(other) == key(line)));
    kept.chain(instead.iter().copied()).map(|line| format!("{line}\n")).collect()
}
