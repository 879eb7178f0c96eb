//! A device of candle's with a pool and a copier beside it, and single tensors through the pool's buffers.

use candle_core::{DType, Device, Result, Tensor};
use pinpool::copier::Priority;
use pinpool::{Copier, DeviceSlice, PinnedBuf, Pool, Stream, Unpinned};

use crate::place::{self, Place};
use crate::wrap;

/// Clones share everything.
#[derive(Clone)]
pub struct Pinned {
    candle: Device,
    device: pinpool::Device,
    pool: Pool,
    copier: Copier,
    stream: Stream,
}

impl Pinned {
    /// A pool of this many bytes for a device of candle's. On candle's CPU device memory that may not be pinned is
    /// used unpinned: no device copies it.
    pub fn new(candle: &Device, capacity: usize) -> Result<Self> {
        Self::with_threads(candle, capacity, None)
    }

    /// The same with so many threads of the copier, in place of its default.
    pub fn with_threads(candle: &Device, capacity: usize, threads: Option<usize>) -> Result<Self> {
        let device = place::device(candle)?;
        let unpinned = if candle.is_cpu() { Unpinned::Allow } else { Unpinned::default() };
        let pool = Pool::builder(&device).capacity(capacity).unpinned(unpinned).build().map_err(wrap)?;
        Self::from(candle, &device, &pool, threads)
    }

    /// The same with a pool that the program has. The device is the pool's.
    pub fn with(candle: &Device, device: &pinpool::Device, pool: &Pool) -> Result<Self> {
        Self::from(candle, device, pool, None)
    }

    fn from(candle: &Device, device: &pinpool::Device, pool: &Pool, threads: Option<usize>) -> Result<Self> {
        let builder = Copier::builder(pool, device);
        let builder = threads.iter().fold(builder, |builder, threads| builder.threads(*threads));
        let copier = builder.build().map_err(wrap)?;
        let stream = device.stream().map_err(wrap)?;
        Ok(Self { candle: candle.clone(), device: device.clone(), pool: pool.clone(), copier, stream })
    }

    /// The same with another copier between its pool and its device.
    #[must_use]
    pub fn with_copier(&self, copier: Copier) -> Self {
        Self { copier, ..self.clone() }
    }

    /// Candle's device.
    pub fn candle(&self) -> &Device {
        &self.candle
    }

    /// The crate's device.
    pub fn device(&self) -> &pinpool::Device {
        &self.device
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The copier.
    pub fn copier(&self) -> &Copier {
        &self.copier
    }

    /// A tensor of the bytes of a buffer, which comes back. Waits for the copy.
    pub fn upload(&self, buf: PinnedBuf, dtype: DType, shape: &[usize]) -> Result<(Tensor, PinnedBuf)> {
        let len = shape.iter().product::<usize>() * dtype.size_in_bytes();
        if len != buf.len() {
            candle_core::bail!("a tensor of {dtype:?} {shape:?} has {len} bytes, the buffer {}", buf.len());
        }
        match Place::new(&self.device, &self.candle, dtype, shape, len)? {
            #[cfg(feature = "cuda")]
            Place::Cuda(tensor, slice) => {
                let sent = self.stream.upload(buf, slice).map_err(|refused| wrap(refused.error))?;
                let buf = sent.wait().map_err(wrap)?;
                Ok((tensor, buf))
            }
            Place::Empty | Place::Host(_) => {
                Ok((Tensor::from_raw_buffer(&buf, dtype, shape, &self.candle)?, buf))
            }
        }
    }

    /// The bytes of a tensor, in the order of its elements, in a buffer of the pool. Waits for what this thread has
    /// submitted to candle's stream, and for the copy.
    pub fn download(&self, tensor: &Tensor) -> Result<PinnedBuf> {
        let tensor = tensor.contiguous()?;
        let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let mut buf = self.pool.checkout(len).map_err(wrap)?;
        match place::borrowed(&self.device, &tensor)? {
            Some(slice) => {
                let back = self.stream.download(slice, buf).map_err(|refused| wrap(refused.error))?;
                back.wait().map_err(wrap)
            }
            None => {
                let mut bytes = Vec::with_capacity(len);
                tensor.write_bytes(&mut bytes)?;
                buf.extend_from_slice(&bytes);
                Ok(buf)
            }
        }
    }

    /// Bytes that have landed, while the transfer that wrote them may still be under way: the copier orders no call behind
    /// another.
    pub(crate) fn read(&self, slice: &DeviceSlice) -> Result<Vec<u8>> {
        let mut bytes = vec![0; slice.len()];
        let foreground = self.copier.with_priority(Priority::Foreground);
        foreground.download_slices(&mut [(slice.clone(), &mut bytes[..])]).map_err(wrap)?;
        Ok(bytes)
    }
}
