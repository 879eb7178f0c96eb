//! A Llama of candle's behind HTTP, or a bench of its start. See README.md.
//!
//! ```text
//! pinpool-candle --write small|8b DIR [--seed N]
//! pinpool-candle --bench DIR [--loader candle|pinpool] [--tokens N] [--own-stream] [--no-warm] [--pool-mib N]
//! pinpool-candle --serve DIR [--listen ADDRESS] [...]
//! pinpool-candle --loads DIR [--rounds N] [...]
//! pinpool-candle --compare DIR [...]
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use candle_core::{Device, Result, bail};
use pinpool_candle::checkpoint::{self, Size};
use pinpool_candle::model::{self, Loader, Model};
use pinpool_candle::server::Server;
use pinpool_candle::{Opening, Pinned, Weights, measure};

const PROMPT: &str = "The pool pins large regions once, and cuts them into segments.";

struct Options {
    mode: String,
    size: Size,
    folder: PathBuf,
    loader: Loader,
    listen: String,
    tokens: usize,
    seed: u64,
    pool: usize,
    threads: usize,
    rounds: usize,
    own_stream: bool,
    cpu: bool,
    warm: bool,
}

fn options() -> std::result::Result<Options, String> {
    let mut options = Options {
        mode: String::new(),
        size: Size::Small,
        folder: PathBuf::new(),
        loader: Loader::Pinpool,
        listen: "127.0.0.1:8080".into(),
        tokens: 16,
        seed: 1,
        pool: 256 << 20,
        threads: thread::available_parallelism().map_or(1, |cores| cores.get().min(8)),
        rounds: 5,
        own_stream: false,
        cpu: !cfg!(feature = "cuda"),
        warm: true,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| text.parse::<usize>().map_err(|error| format!("{text:?}: {error}"));
        match arg.as_str() {
            "--write" => {
                options.size = match value()?.as_str() {
                    "small" => Size::Small,
                    "8b" => Size::Eight,
                    other => return Err(format!("no size {other:?}: small or 8b")),
                };
                (options.mode, options.folder) = (arg.clone(), value()?.into());
            }
            "--bench" | "--serve" | "--compare" | "--loads" => {
                (options.mode, options.folder) = (arg.clone(), value()?.into())
            }
            "--loader" => {
                options.loader = match value()?.as_str() {
                    "candle" => Loader::Candle,
                    "pinpool" => Loader::Pinpool,
                    other => return Err(format!("no loader {other:?}: candle or pinpool")),
                }
            }
            "--listen" => options.listen = value()?,
            "--tokens" => options.tokens = number(value()?)?,
            "--seed" => options.seed = number(value()?)? as u64,
            "--pool-mib" => options.pool = number(value()?)? << 20,
            "--threads" => options.threads = number(value()?)?,
            "--rounds" => options.rounds = number(value()?)?,
            "--own-stream" => options.own_stream = true,
            "--cpu" => options.cpu = true,
            "--no-warm" => options.warm = false,
            _ => return Err(format!("unknown argument {arg:?}")),
        }
    }
    if options.mode.is_empty() {
        Err("one of --write, --bench, --serve, --loads, --compare".into())
    } else {
        Ok(options)
    }
}

fn device(options: &Options) -> Result<Device> {
    match (options.cpu, options.own_stream) {
        (true, _) => Ok(Device::Cpu),
        (_, true) => Device::new_cuda_with_stream(0),
        (_, false) => Device::new_cuda(0),
    }
}

fn pinned(options: &Options, device: &Device) -> Result<Pinned> {
    Pinned::with_threads(device, options.pool, Some(options.threads))
}

/// The age of the process in seconds, by the system's clock of 10 ms.
fn age() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let start: f64 = stat.rsplit(") ").next()?.split(' ').nth(19)?.parse().ok()?;
    let uptime: f64 = std::fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok()?;
    Some((uptime - start / 100.0).max(0.0))
}

/// The model by the chosen loader. `show` gets the crate's load while it is under way, and when it began.
/// Also gives the time at which the weights were there, which may be before the kernels were.
fn load(
    options: &Options,
    device: &Device,
    show: impl FnOnce(&Pinned, &Arc<Weights>, Instant),
) -> Result<(Model, Instant)> {
    let config = model::config(&options.folder)?;
    let (warm, gpu) = (options.warm, device.clone());
    // Both loaders have it: the kernels load while the weights do.
    let warming = thread::spawn(move || if warm { Model::warm(&config, &gpu) } else { Ok(()) });
    let model = match options.loader {
        Loader::Candle => Model::candle(&options.folder, device),
        Loader::Pinpool => {
            let pinned = pinned(options, device)?;
            let opened = Instant::now();
            let weights = Arc::new(Weights::open(&pinned, &options.folder)?);
            show(&pinned, &weights, opened);
            Model::pinpool(&weights, &options.folder, &pinned)
        }
    }?;
    device.synchronize()?;
    let loaded = Instant::now();
    match warming.join() {
        Ok(warmed) => warmed?,
        Err(_) => bail!("the thread that warms the kernels panicked"),
    }
    Ok((model, loaded))
}

fn bench(options: &Options, main: Instant, age: f64) -> Result<()> {
    let device = device(options)?;
    let device_s = main.elapsed().as_secs_f64();
    let bytes: u64 =
        model::files(&options.folder)?.iter().flat_map(std::fs::metadata).map(|file| file.len()).sum();
    let start = Instant::now();
    let (mut pool_s, mut opening) = (0.0, Opening::default());
    let (model, loaded) = load(options, &device, |_, weights, opened| {
        (pool_s, opening) = ((opened - start).as_secs_f64(), weights.opening());
    })?;
    let model_s = (loaded - start).as_secs_f64();
    let mut first = None;
    let decoding = Instant::now();
    let tokens = model.generate(&model::encode(PROMPT), options.tokens, |_| {
        first.get_or_insert_with(|| age + main.elapsed().as_secs_f64());
        true
    })?;
    let decode_s = decoding.elapsed().as_secs_f64();
    let peak = measure::peak(&pinned(options, &device)?)?;
    let gb_per_s = bytes as f64 / (model_s - pool_s) / 1e9;
    let line = serde_json::json!({
        "loader": format!("{:?}", options.loader).to_lowercase(),
        "own_stream": options.own_stream, "warm": options.warm, "bytes": bytes,
        "file_system": measure::file_system(&options.folder),
        "main_s": age, "device_s": device_s, "pool_s": pool_s, "headers_s": opening.headers.as_secs_f64(),
        "places_s": opening.places.as_secs_f64(), "submitted_s": opening.all.as_secs_f64(), "model_s": model_s,
        "gb_per_s": gb_per_s, "peak_gb_per_s": peak, "of_peak": gb_per_s / peak,
        "first_token_s": first, "decode_s": decode_s, "tokens": tokens,
    });
    println!("{line}");
    Ok(())
}

/// The load without a model, beside what bounds it, by turns. The last line has the medians.
fn loads(options: &Options) -> Result<()> {
    let device = device(options)?;
    let pinned = pinned(options, &device)?;
    let files = model::files(&options.folder)?;
    let block = measure::block(&pinned, &files)?;
    let threads = options.threads;
    let names = ["peak", "read", "plain", "load", "load_of_peak", "load_of_plain"];
    let mut rows: [Vec<f64>; 6] = Default::default();
    for round in 0..=options.rounds {
        let peak = measure::peak(&pinned)?;
        let read = measure::read(&files, threads)?;
        let plain = measure::plain(&pinned, &files, &block)?;
        let start = Instant::now();
        let weights = Weights::open(&pinned, &options.folder)?;
        weights.finish()?;
        let (load_s, opening) = (start.elapsed().as_secs_f64(), weights.opening());
        let load = weights.bytes() as f64 / load_s / 1e9;
        drop(weights);
        device.synchronize()?;
        let line = serde_json::json!({
            "round": round, "peak": peak, "read": read, "plain": plain, "load": load, "load_s": load_s,
            "headers_s": opening.headers.as_secs_f64(), "places_s": opening.places.as_secs_f64(),
            "submitted_s": opening.all.as_secs_f64(),
        });
        println!("{line}");
        // The first round warms up.
        for (row, rate) in rows.iter_mut().zip([peak, read, plain, load, load / peak, load / plain]) {
            row.extend((round > 0).then_some(rate));
        }
    }
    let medians: serde_json::Map<_, _> =
        names.iter().zip(rows).map(|(name, row)| (name.to_string(), measure::median(row).into())).collect();
    let line = serde_json::json!({
        "medians": medians, "threads": threads, "file_system": measure::file_system(&options.folder),
    });
    println!("{line}");
    Ok(())
}

/// All tensors by both loaders, bit by bit, and the speed of each without a model.
fn compare(options: &Options) -> Result<()> {
    let device = device(options)?;
    let pinned = pinned(options, &device)?;
    let start = Instant::now();
    let weights = Weights::open(&pinned, &options.folder)?;
    let submitted = start.elapsed();
    weights.finish()?;
    let ours = start.elapsed();
    let files = model::files(&options.folder)?;
    // SAFETY: the files are this program's own, and not written to.
    let theirs = unsafe { candle_core::safetensors::MmapedSafetensors::multi(&files) }?;
    let (mut equal, mut theirs_s) = (0, 0.0);
    for (name, _) in theirs.tensors() {
        let start = Instant::now();
        let tensor = theirs.load(&name, &device)?;
        device.synchronize()?;
        theirs_s += start.elapsed().as_secs_f64();
        // By the bytes on the device, of which the CPU compares what comes back.
        if bytes_of(&tensor)? != bytes_of(&weights.get(&name)?)? {
            bail!("{name:?} differs");
        }
        equal += 1;
    }
    let rate = |seconds: f64| weights.bytes() as f64 / seconds / 1e9;
    let line = serde_json::json!({
        "equal_tensors": equal, "bytes": weights.bytes(), "submitted_s": submitted.as_secs_f64(),
        "pinpool_gb_per_s": rate(ours.as_secs_f64()), "candle_gb_per_s": rate(theirs_s),
    });
    println!("{line}");
    Ok(())
}

fn bytes_of(tensor: &candle_core::Tensor) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes)?;
    Ok(bytes)
}

fn serve(options: Options) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let listen = options.listen.clone();
    let server = Server::start(move |server| {
        let device = device(&options)?;
        load(&options, &device, |pinned, weights, _| {
            if let Err(error) = server.show(pinned, weights) {
                eprintln!("no metrics: {error}");
            }
        })
        .map(|(model, _)| model)
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(&listen).await?;
        println!("listening on http://{}", listener.local_addr()?);
        let ended = async {
            let _ = tokio::signal::ctrl_c().await;
        };
        axum::serve(listener, server.router()).with_graceful_shutdown(ended).await?;
        Ok(())
    })
}

fn write(size: Size, seed: u64, folder: &Path) -> std::io::Result<()> {
    let start = Instant::now();
    checkpoint::write(size, seed, folder)?;
    println!("{} written in {:.1} s", folder.display(), start.elapsed().as_secs_f64());
    Ok(())
}

fn main() -> ExitCode {
    let (main, age) = (Instant::now(), age().unwrap_or_default());
    let options = match options() {
        Ok(options) => options,
        Err(why) => {
            eprintln!("pinpool-candle: {why}; see README.md");
            return ExitCode::from(2);
        }
    };
    let done = match options.mode.as_str() {
        "--write" => write(options.size, options.seed, &options.folder).map_err(|error| error.to_string()),
        "--bench" => bench(&options, main, age).map_err(|error| error.to_string()),
        "--loads" => loads(&options).map_err(|error| error.to_string()),
        "--compare" => compare(&options).map_err(|error| error.to_string()),
        _ => serve(options).map_err(|error| error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("pinpool-candle: {why}");
            ExitCode::FAILURE
        }
    }
}
