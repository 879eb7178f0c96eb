//! A server that computes through cudarc, and the pool, share one context and one stream.
//!
//! `cargo run --release --features cudarc --example cudarc` needs an NVIDIA GPU. The server's kernels and the pool's
//! copies follow each other in the order of the stream; the CPU does not wait in between.

#![allow(unsafe_code, reason = "cudarc's unsafe calls")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use pinpool::cudarc::CudarcStream;
use pinpool::{PinnedBuf, Pool};

/// Doubles each of `n` floats.
const KERNEL: &str = r"
.version 7.0
.target sm_50
.address_size 64

.visible .entry twice(.param .u64 floats, .param .u32 n)
{
    .reg .pred %p;
    .reg .f32 %f;
    .reg .b32 %i, %n, %block, %width, %thread;
    .reg .b64 %at, %offset;
    ld.param.u64 %at, [floats];
    ld.param.u32 %n, [n];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %block, %width, %thread;
    setp.ge.u32 %p, %i, %n;
    @%p bra DONE;
    cvta.to.global.u64 %at, %at;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %at, %at, %offset;
    ld.global.f32 %f, [%at];
    add.f32 %f, %f, %f;
    st.global.f32 [%at], %f;
DONE:
    ret;
}
";

const FLOATS: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cudarc panics where there is no driver.
    if let Err(error) = pinpool::Device::open("cuda:0") {
        eprintln!("this example needs an NVIDIA GPU: {error}");
        std::process::exit(1);
    }
    // The server's own context, stream, kernel and memory.
    let context: Arc<CudaContext> = CudaContext::new(0)?;
    let stream: Arc<CudaStream> = context.new_stream()?;
    let twice: CudaFunction = context.load_module(KERNEL.into())?.load_function("twice")?;
    let mut activations = stream.alloc_zeros::<f32>(FLOATS)?;

    // The pool uses the same context and the same stream.
    let device = pinpool::cudarc::device(&context)?;
    let pool = Pool::builder(&device).capacity(64 << 20).build()?;
    // SAFETY: nothing here captures a stream.
    let shared = unsafe { CudarcStream::new(&stream) }?;
    println!("one context and one stream, on {}", device.name());

    for round in 0..4 {
        let mut input: PinnedBuf = pool.checkout(FLOATS * 4)?;
        let values: Vec<f32> = (0..FLOATS).map(|i| (i + round) as f32).collect();
        input.try_extend_from(&values)?;

        // Upload, kernel, download: three operations in order on one stream.
        drop(shared.upload_to(input, &mut activations)?);
        let mut launch = stream.launch_builder(&twice);
        let n = FLOATS as u32;
        launch.arg(&mut activations).arg(&n);
        // SAFETY: the kernel's parameters are a pointer to `n` floats and their number.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }?;
        let landing = pool.checkout_on(&shared, FLOATS * 4)?;
        let output = shared.download_from(&activations, landing)?.wait()?;

        let doubled: &[f32] = output.view()?;
        assert!(doubled.iter().zip(&values).all(|(out, value)| *out == value * 2.0));
        println!("round {round}: {FLOATS} floats up, doubled, and back");
    }
    let stats = pool.stats();
    println!(
        "{} checkouts of {} pinned bytes, {} in flight",
        stats.checkouts, stats.pinned_bytes, stats.in_flight_bytes
    );
    Ok(())
}
