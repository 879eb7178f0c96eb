//! A checkpoint is loaded to the device, and each tensor is used as soon as it is complete.
//!
//! `cargo run --release -p pinpool-safetensors --example safetensors -- MODEL [PREFIX]`, where `MODEL` is a
//! `.safetensors` file, an index, or a folder, and only names with the prefix are loaded. Without arguments it makes a
//! small checkpoint.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use pinpool::copier::Copier;
use pinpool::{Device, DeviceSlice, Pool, Unpinned};
use pinpool_safetensors::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (path, _sample) = match args.next() {
        Some(path) => (PathBuf::from(path), None),
        None => {
            // A file with a random name, removed when `_sample` is dropped.
            let mut file = tempfile::Builder::new().suffix(".safetensors").tempfile()?;
            file.write_all(&small())?;
            (file.path().to_owned(), Some(file))
        }
    };
    let device = Device::open("auto")?;
    // A server leaves `unpinned` at its default, which is to refuse. This example runs under any memlock limit.
    let pool = Pool::builder(&device).capacity(256 << 20).unpinned(Unpinned::Allow).build()?;
    let copier = Copier::builder(&pool, &device).build()?;

    // Reads the headers and checks them.
    let checkpoint = Checkpoint::open(path)?;
    println!(
        "{} tensors, {} bytes in all, to {}",
        checkpoint.tensors().count(),
        checkpoint.bytes(),
        device.name()
    );

    let start = Instant::now();
    let prefix = args.next().unwrap_or_default();
    let loader = checkpoint.loader(&copier).filter(|tensor| tensor.name().starts_with(&prefix));
    let loading = loader.start()?;
    let mut tensors = Vec::new();
    for tensor in loading.blocking() {
        // This tensor is on the device; later ones are still being read. A server builds its first layers now.
        let tensor = tensor?;
        if tensors.is_empty() {
            // A name may be any text, so it is printed escaped, by `{:?}`.
            println!(
                "{:?} is there after {:?}; {:?} left",
                tensor.name(),
                start.elapsed(),
                loading.progress().remaining()
            );
        }
        tensors.push(tensor);
    }
    println!("all of {} after {:?}", tensors.len(), start.elapsed());

    for tensor in tensors.iter().take(5) {
        let address = tensor.slice().map(DeviceSlice::address);
        println!("{:?} {} {:?} at {address:?}", tensor.name(), tensor.dtype(), tensor.shape());
    }
    Ok(())
}

/// Three layers of a matrix and a vector each, in the format.
fn small() -> Vec<u8> {
    let (mut header, mut end) = (String::from("{"), 0);
    for layer in 0..3 {
        for (name, shape, len) in [("weight", "[64,256]", 64 * 256 * 2), ("bias", "[64]", 64 * 2)] {
            let comma = if end > 0 { "," } else { "" };
            let place = format!("[{end},{}]", end + len);
            header += &format!(
                r#"{comma}"layer.{layer}.{name}":{{"dtype":"BF16","shape":{shape},"data_offsets":{place}}}"#
            );
            end += len;
        }
    }
    header.push('}');
    let bytes = (0..end).map(|i: usize| (i % 251) as u8);
    (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(bytes).collect()
}
