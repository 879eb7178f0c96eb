//! What a load is measured with: the pinned peak, the files read by plain loops, and the same files by the copier into one
//! block. So a slow link, slow memory and slow places of tensors are told apart.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::Result;
use pinpool::copier::FileSource;
use pinpool::{DeviceSlice, Pool, Unpinned};

use crate::{Pinned, wrap};

/// Bytes of a copy that gives the peak.
const WHOLE: usize = 256 << 20;
const ROUNDS: usize = 5;
/// Bytes of a read.
const CHUNK: usize = 4 << 20;

fn rate(bytes: usize, since: Instant) -> f64 {
    bytes as f64 / since.elapsed().as_secs_f64() / 1e9
}

/// The median of some rates.
pub fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
}

/// GB/s of one plain copy of 256 MiB from pinned memory at a time: the median of five, after one that does not count. Its
/// memory is a pool of its own.
pub fn peak(pinned: &Pinned) -> Result<f64> {
    let (device, len) = (pinned.device(), if pinned.candle().is_cpu() { 16 << 20 } else { WHOLE });
    let unpinned = if pinned.candle().is_cpu() { Unpinned::Allow } else { Unpinned::default() };
    let builder = Pool::builder(device).capacity(2 * len).extent(2 * len).initial(2 * len).unpinned(unpinned);
    let pool = builder.build().map_err(wrap)?;
    let (stream, memory) = (device.stream().map_err(wrap)?, device.alloc(len).map_err(wrap)?);
    let mut buf = pool.checkout(len).map_err(wrap)?;
    buf.try_resize(len, 1).map_err(wrap)?;
    let mut rates = Vec::new();
    for _ in 0..=ROUNDS {
        let since = Instant::now();
        let sent = stream.upload(buf, &memory).map_err(|refused| wrap(refused.error))?;
        buf = sent.wait().map_err(wrap)?;
        rates.push(rate(len, since));
    }
    Ok(median(rates.split_off(1)))
}

/// GB/s of reading the files into ordinary memory by plain loops of so many threads. No load from these files is faster.
pub fn read(files: &[PathBuf], threads: usize) -> Result<f64> {
    let (mut parts, mut bytes) = (Vec::new(), 0);
    for path in files {
        let file = File::open(path)?;
        let len = file.metadata()?.len() as usize;
        bytes += len;
        parts.extend((0..len).step_by(CHUNK).map(|at| (path, at, CHUNK.min(len - at))));
    }
    let mut segments = vec![1_u8; threads * CHUNK];
    let since = Instant::now();
    std::thread::scope(|scope| {
        let running: Vec<_> = segments
            .chunks_mut(CHUNK)
            .enumerate()
            .map(|(thread, segment)| {
                let parts = parts.iter().skip(thread).step_by(threads);
                scope.spawn(move || -> std::io::Result<()> {
                    let mut last: Option<(&PathBuf, File)> = None;
                    for (path, at, len) in parts {
                        let file = match &last {
                            Some((known, file)) if known == path => file,
                            _ => &last.insert((path, File::open(path)?)).1,
                        };
                        file.read_exact_at(&mut segment[..*len], *at as u64)?;
                    }
                    Ok(())
                })
            })
            .collect();
        running.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a reader panicked")))
        })
    })?;
    Ok(rate(bytes, since))
}

/// Memory for [`plain`].
pub fn block(pinned: &Pinned, files: &[PathBuf]) -> Result<DeviceSlice> {
    let lens = files.iter().map(|path| Ok(path.metadata()?.len() as usize));
    pinned.device().alloc(lens.sum::<Result<usize>>()?).map_err(wrap)
}

/// GB/s of the files, whole, into one block of memory that is there: one transfer of the copier for each.
pub fn plain(pinned: &Pinned, files: &[PathBuf], block: &DeviceSlice) -> Result<f64> {
    let (since, mut at, mut transfers) = (Instant::now(), 0, Vec::new());
    for path in files {
        let source = FileSource::open(path).map_err(wrap)?;
        let end = at + source.len() as usize;
        let place = block.slice(at..end).map_err(wrap)?;
        let sent = pinned.copier().upload(source, place);
        transfers.push(sent.map_err(|refused| wrap(refused.error))?);
        at = end;
    }
    for transfer in transfers {
        transfer.wait().map_err(|refused| wrap(refused.error))?;
    }
    Ok(rate(at, since))
}

/// The type of the file system that has this path, such as `ext4`, or `tmpfs`, from which reading is slower.
pub fn file_system(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let fields = mounts.lines().map(|line| line.split(' ').skip(1));
    let holds = fields.filter_map(|mut fields| Some((fields.next()?, fields.next()?)));
    let longest = holds.filter(|(at, _)| path.starts_with(at)).max_by_key(|(at, _)| at.len());
    longest.map(|(_, kind)| kind.to_owned())
}
