//! A tensor on the device.

use std::io::{self, Write};
use std::sync::Arc;

use super::header::Tensor;
use super::sums::Hasher;
use crate::copy::copier::{Copier, Piece};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};

use ::safetensors::Dtype;

/// A tensor on the device. Work submitted to any stream from now on finds the bytes there. The tensors of one file
/// share a block of device memory, which lives until the last handle to any of them is dropped.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned, safetensors::Checkpoint};
/// # let path = std::env::temp_dir().join(format!("pinpool-device-tensor-{}.safetensors", std::process::id()));
/// # let header = br#"{"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let copier = Copier::builder(&pool, &device).build()?;
/// # let checkpoint = Checkpoint::open(&path)?;
/// let tensor = checkpoint.tensor(&copier, "a")?.expect("the file has it");
/// assert_eq!((tensor.shape(), tensor.address().is_some()), (&[2_usize, 2][..], true));
/// let bytes = copier.download_vec(tensor.slice().expect("it has elements"))?;
/// assert_eq!(bytes, b"abcd");
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DeviceTensor {
    /// The list of all tensors of its file, which all handles share, and its index there: so a handle takes the same
    /// few bytes whatever the tensor's name and shape are.
    all: Arc<Vec<Tensor>>,
    index: u32,
    slice: Option<DeviceSlice>,
    checksum: Option<u128>,
}

impl DeviceTensor {
    /// `index` is an index into `all`.
    pub(super) fn new(
        all: Arc<Vec<Tensor>>,
        index: u32,
        slice: Option<DeviceSlice>,
        checksum: Option<u128>,
    ) -> Self {
        Self { all, index, slice, checksum }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.tensor().name()
    }

    /// The type of its elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.tensor().dtype()
    }

    /// Elements along each axis.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.tensor().shape()
    }

    /// The tensor as its file's header describes it.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.all[self.index as usize]
    }

    /// Its bytes on the device. `None` for a tensor without elements, which has none.
    #[must_use]
    pub fn slice(&self) -> Option<&DeviceSlice> {
        self.slice.as_ref()
    }

    /// The address of its first byte, a multiple of the loader's alignment: see [`DeviceSlice::address`]. `None` for a
    /// tensor without elements.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.slice.as_ref().map(DeviceSlice::address)
    }

    /// The [checksum](super#checksums) of its bytes as they were read, if [the loader took
    /// it](super::Loader::checksums).
    #[must_use]
    pub fn checksum(&self) -> Option<u128> {
        self.checksum
    }

    /// The [checksum](super#checksums) of its bytes on the device, which are copied back for that.
    ///
    /// # Errors
    /// As for [`device_checksums`].
    pub fn device_checksum(&self, copier: &Copier) -> Result<u128> {
        let sums = device_checksums(copier, std::slice::from_ref(self))?;
        sums.first().copied().ok_or(Error::Empty)
    }
}

impl std::fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceTensor")
            .field("tensor", self.tensor())
            .field("slice", &self.slice)
            .field("checksum", &self.checksum)
            .finish()
    }
}

/// The [checksums](super#checksums) of tensors' bytes on the device, in the order of `tensors`. The bytes are copied
/// back through the copier, in large chunks where tensors lie side by side, and hashed on the caller's thread.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned, safetensors::Checkpoint};
/// # let path = std::env::temp_dir().join(format!("pinpool-device-checksums-{}.safetensors", std::process::id()));
/// # let header = br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let copier = Copier::builder(&pool, &device).build()?;
/// # let checkpoint = Checkpoint::open(&path)?;
/// use pinpool::safetensors::device_checksums;
///
/// let tensors = checkpoint.loader(&copier).checksums(true).load()?;
/// let on_device = device_checksums(&copier, &tensors)?;
/// assert_eq!(tensors[0].checksum(), Some(on_device[0]));
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As for [`Copier::download_write`].
pub fn device_checksums(copier: &Copier, tensors: &[DeviceTensor]) -> Result<Vec<u128>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    for slice in tensors.iter().filter_map(DeviceTensor::slice) {
        pieces.push(Piece::new(at, slice));
        at += slice.len() as u64;
    }
    let lens = tensors.iter().map(|tensor| tensor.slice.as_ref().map_or(0, DeviceSlice::len));
    let mut splitter =
        Splitter { lens: lens.collect(), sums: Vec::new(), current: Hasher::default(), left: 0 };
    splitter.advance();
    if !pieces.is_empty() {
        copier.download_write_ranges(pieces, &mut splitter)?;
    }
    let Splitter { lens, sums, .. } = splitter;
    match sums.len() == lens.len() {
        true => Ok(sums),
        false => Err(Error::TooSmall { need: lens.len(), have: sums.len() }),
    }
}

/// Takes the checksums of tensors whose bytes are written one behind the other.
struct Splitter {
    /// The lengths of all tensors.
    lens: Vec<usize>,
    /// The checksums of those that are complete.
    sums: Vec<u128>,
    current: Hasher,
    /// Bytes of the current tensor that are still to come.
    left: usize,
}

impl Splitter {
    /// Goes to the next tensor that has bytes, or to the end.
    fn advance(&mut self) {
        while let Some(&len) = self.lens.get(self.sums.len()) {
            if len > 0 {
                self.left = len;
                return;
            }
            self.sums.push(Hasher::default().digest());
        }
    }
}

impl Write for Splitter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.left);
        self.current.update(&bytes[..n]);
        self.left -= n;
        if self.left == 0 && n > 0 {
            self.sums.push(std::mem::take(&mut self.current).digest());
            self.advance();
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
