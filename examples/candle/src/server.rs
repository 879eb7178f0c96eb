//! The server: `POST /generate` streams tokens, `GET /metrics` is for Prometheus, `GET /health` says how far the load is.
//!
//! One thread loads the model and then decodes, request by request: candle's default stream is the thread's own, and
//! order holds on one thread only. Requests are accepted from the start, and wait in that thread's queue until the
//! weights are there.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::extract::{Json, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use pinpool::telemetry::{Histogram, Sampler, Sampling};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::model::{Model, decode, encode};
use crate::{Pinned, Weights};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// What the server counts itself. All are sums that only the page reads, so no order is needed.
#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    tokens: AtomicU64,
    ready_after_micros: AtomicU64,
}

struct Request {
    prompt: String,
    tokens: usize,
    out: UnboundedSender<String>,
}

/// Shared by the handlers and the thread of the model.
pub struct Server {
    queue: mpsc::Sender<Request>,
    counts: Counts,
    /// Set when the load begins, by the loader of the crate only.
    weights: OnceLock<Arc<Weights>>,
    telemetry: OnceLock<(PrometheusHandle, Sampling)>,
    failed: OnceLock<String>,
}

impl Server {
    /// Starts the thread, which makes the model by `load` and then answers requests.
    pub fn start<F>(load: F) -> std::io::Result<Arc<Self>>
    where
        F: FnOnce(&Server) -> candle_core::Result<Model> + Send + 'static,
    {
        let (queue, requests) = mpsc::channel::<Request>();
        let (weights, telemetry, failed) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let server = Arc::new(Self { queue, counts: Counts::default(), weights, telemetry, failed });
        let shared = Arc::downgrade(&server);
        let since = Instant::now();
        std::thread::Builder::new().name("model".into()).spawn(move || {
            let Some(server) = shared.upgrade() else { return };
            let model = match load(&server) {
                Ok(model) => model,
                Err(error) => {
                    eprintln!("the model cannot be loaded: {error}");
                    let _ = server.failed.set(error.to_string());
                    return;
                }
            };
            server.counts.ready_after_micros.store(since.elapsed().as_micros() as u64, Relaxed);
            // The thread must not keep its own queue open.
            drop(server);
            for request in requests {
                let Some(server) = shared.upgrade() else { return };
                server.counts.requests.fetch_add(1, Relaxed);
                let each = |token| {
                    server.counts.tokens.fetch_add(1, Relaxed);
                    // A client that is gone ends its request.
                    request.out.send(decode(token)).is_ok()
                };
                if let Err(error) = model.generate(&encode(&request.prompt), request.tokens, each) {
                    let _ = request.out.send(format!("\nerror: {error}"));
                }
            }
        })?;
        Ok(server)
    }

    /// Shows a load of the crate on `/health`, and its pool on `/metrics`.
    pub fn show(&self, pinned: &Pinned, weights: &Arc<Weights>) -> Result<(), AnyError> {
        let _ = self.weights.set(weights.clone());
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Prefix("pinpool".into()), &Histogram::bounds_seconds())?
            .install_recorder()?;
        let sampling = Sampler::new(pinned.pool()).spawn(std::time::Duration::from_secs(1))?;
        let _ = self.telemetry.set((handle, sampling));
        Ok(())
    }

    /// The routes.
    pub fn router(self: &Arc<Self>) -> axum::Router {
        axum::Router::new()
            .route("/generate", post(generate))
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .with_state(self.clone())
    }

    fn ready(&self) -> bool {
        self.counts.ready_after_micros.load(Relaxed) > 0
    }
}

/// The tokens of one request, as a body that streams.
struct Tokens(UnboundedReceiver<String>);

impl futures_core::Stream for Tokens {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|token| token.map(|token| Ok(token.into())))
    }
}

async fn generate(State(server): State<Arc<Server>>, Json(body): Json<serde_json::Value>) -> Response {
    let prompt = body["prompt"].as_str().unwrap_or_default().to_owned();
    if prompt.is_empty() {
        return (StatusCode::BAD_REQUEST, "the body is {\"prompt\": TEXT, \"max_tokens\": NUMBER}\n")
            .into_response();
    }
    let tokens = body["max_tokens"].as_u64().unwrap_or(16).min(4096) as usize;
    let (out, tokens_out) = unbounded_channel();
    if server.failed.get().is_some() || server.queue.send(Request { prompt, tokens, out }).is_err() {
        return (StatusCode::SERVICE_UNAVAILABLE, "the model could not be loaded\n").into_response();
    }
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], Body::from_stream(Tokens(tokens_out)))
        .into_response()
}

async fn health(State(server): State<Arc<Server>>) -> Response {
    let (landed, bytes) = server.weights.get().map_or((0, 0), |weights| (weights.landed(), weights.bytes()));
    let status = if server.ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let failed = server.failed.get();
    let text = serde_json::json!({"ready": server.ready(), "landed_bytes": landed, "bytes": bytes, "failed": failed});
    (status, Json(text)).into_response()
}

async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let counts = &server.counts;
    let ready = counts.ready_after_micros.load(Relaxed) as f64 / 1e6;
    let mut text = server.telemetry.get().map(|(handle, _)| handle.render()).unwrap_or_default();
    text += &format!(
        "# TYPE server_requests_total counter\nserver_requests_total {}\n\
         # TYPE server_tokens_total counter\nserver_tokens_total {}\n\
         # TYPE server_ready_after_seconds gauge\nserver_ready_after_seconds {ready}\n",
        counts.requests.load(Relaxed),
        counts.tokens.load(Relaxed),
    );
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4"), (header::CACHE_CONTROL, "no-store")], text)
        .into_response()
}
