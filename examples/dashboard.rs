//! A server with a pool under load. It serves its metrics for Prometheus, and a page that shows them live.
//!
//! `cargo run --release --features metrics --example dashboard`, then open <http://127.0.0.1:9185/>, or run `pinpool
//! top` in a terminal. With `--device cuda:0` the load runs on a GPU.
//!
//! The example has three parts. A real server needs the first two:
//!
//! - [`Telemetry`]: a recorder of the crate metrics-exporter-prometheus, with the library's buckets for its histograms,
//!   and a [`Sampler`] that sends the pool's counters to it;
//! - [`router`]: `/metrics` with the text that the recorder renders, and `/` with a page that reads only `/metrics`, so
//!   that any program can serve the page unchanged;
//! - `load`: threads that use the pool like an inference server, so that there is something to see.
//!
//! The folder `dashboard` also has a dashboard for Grafana (`grafana.json`) and alert rules for Prometheus
//! (`alerts.yml`) on the same metrics. The library does not know how fast the link is. This program measures it before
//! the load starts and exports it as [`PEAK`]; the page, the dashboard and `pinpool top` show the traffic as a share of
//! it.

#[path = "dashboard/load.rs"]
mod load;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::header;
use axum::routing::get;
use clap::Parser;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use pinpool::telemetry::{Histogram, Sampler, Sampling};
use pinpool::{Device, Pool, Unpinned};

use load::Load;

/// The speed of the link, in bytes a second: labels device and direction.
const PEAK: &str = "server.link.peak.bytes_per_second";
const PAGE: &str = include_str!("dashboard/page.html");

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A pool under load, with a page and metrics
#[derive(Clone, Debug, Parser)]
#[command(name = "dashboard")]
pub(crate) struct Options {
    /// The device: auto, host, host:N or cuda:N
    #[arg(long, default_value = "host")]
    pub(crate) device: String,
    /// Where to listen; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:9185")]
    pub(crate) listen: SocketAddr,
    /// The capacity of the pool, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(16..))]
    pub(crate) capacity: u32,
    /// How often the pool is sampled, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..))]
    pub(crate) interval: u32,
}

/// The recorder and the sampler. A process has one recorder, so it has at most one `Telemetry`.
pub(crate) struct Telemetry {
    handle: PrometheusHandle,
    _sampling: Sampling,
}

impl Telemetry {
    /// Installs the recorder and starts the sampler.
    pub(crate) fn install(pool: &Pool, interval: Duration) -> Result<Self, AnyError> {
        // Without bounds the exporter makes summaries, which cannot be added up over servers. With the library's bounds
        // the exporter counts each duration in the same bucket as the library does.
        // A timeout for idle metrics would take away what the server itself counts rarely, or sets but once as `PEAK`. What
        // is gone of pinpool's reads zero.
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Prefix("pinpool".into()), &Histogram::bounds_seconds())?
            .install_recorder()?;
        let sampling = Sampler::new(pool).stuck_after(Duration::from_secs(30)).spawn(interval)?;
        Ok(Self { handle, _sampling: sampling })
    }
}

/// The page, and the metrics that it reads.
pub(crate) fn router(metrics: PrometheusHandle) -> Router {
    let text = move || {
        let text = metrics.render();
        async move {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4"), (header::CACHE_CONTROL, "no-store")], text)
        }
    };
    let page = || async { ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], PAGE) };
    Router::new().route("/", get(page)).route("/metrics", get(text))
}

/// The speed of a copy of pinned memory while the device is otherwise idle: to the device and from it, in bytes a
/// second.
fn measure(pool: &Pool, device: &Device) -> Result<[f64; 2], pinpool::Error> {
    let stream = device.stream()?;
    let len = (pool.stats().capacity_bytes / 4).min(64 << 20);
    let memory = device.alloc(len)?;
    let mut buf = pool.checkout(len)?;
    buf.try_resize(len, 1)?;
    let mut best = [f64::MAX; 2];
    for _ in 0..5 {
        let start = Instant::now();
        buf = stream.upload(buf, &memory)?.wait()?;
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        buf = stream.download(&memory, buf)?.wait()?;
        best[1] = best[1].min(start.elapsed().as_secs_f64());
    }
    Ok(best.map(|seconds| len as f64 / seconds))
}

/// The pool, its load and its metrics.
pub(crate) struct Dashboard {
    pub(crate) pool: Pool,
    pub(crate) telemetry: Telemetry,
    _load: Load,
}

impl Dashboard {
    pub(crate) fn start(options: &Options) -> Result<Self, AnyError> {
        let device = Device::open(&options.device)?;
        let pool = Pool::builder(&device)
            .name("serving")
            .capacity((options.capacity as usize) << 20)
            // Under a low memlock limit the example still runs, and the page shows a warning.
            .unpinned(Unpinned::Allow)
            .build()?;
        let telemetry = Telemetry::install(&pool, Duration::from_millis(options.interval.into()))?;
        let peaks = measure(&pool, &device)?;
        for (direction, peak) in ["upload", "download"].into_iter().zip(peaks) {
            metrics::gauge!(PEAK, "device" => device.name().to_owned(), "direction" => direction).set(peak);
        }
        metrics::describe_gauge!(
            PEAK,
            "The speed of one copy of pinned memory before the load started, in bytes a second."
        );
        let load = Load::start(&pool, &device)?;
        Ok(Self { pool, telemetry, _load: load })
    }

    pub(crate) fn metrics(&self) -> PrometheusHandle {
        self.telemetry.handle.clone()
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match serve(&Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(options: &Options) -> Result<(), AnyError> {
    let dashboard = Dashboard::start(options)?;
    let listener = tokio::net::TcpListener::bind(options.listen).await?;
    println!("http://{}/, and http://{0}/metrics for Prometheus and `pinpool top`", listener.local_addr()?);
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, router(dashboard.metrics())).with_graceful_shutdown(interrupted).await?;
    let stats = dashboard.pool.stats();
    println!("{} checkouts, {} of them waited", stats.checkouts, stats.waits);
    Ok(())
}
