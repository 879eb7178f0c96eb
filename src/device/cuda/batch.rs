//! Many copies by one call: `cuMemcpyBatchAsync`.
//!
//! A small copy costs some 2.5 us as a call of its own, and 0.3 us in a batch. The callers and this
//! module keep the driver's conditions (driver API manual): a stream of the crate's, never the
//! default one and never captured; no length of zero; no copy depends on another one of the batch.
//!
//! The call has two forms. The form of CUDA 12.8, which later drivers have too, also says where it
//! failed. The crate does not use that: after an error it is unknown which copies were submitted,
//! so each is submitted again by itself. A copy that runs twice writes the same bytes twice, since
//! its source is not written meanwhile; and each error then belongs to one copy.
//!
//! Short uploads come first in a call. On an idle stream the driver itself writes an upload of less
//! than 32 KiB, inside of the call, when the copies before it are complete: two copies of 2 MiB and
//! one of 2 KiB are a call of 93 us, and 9 us with the short one first (H200, driver 580).
//!
//! The call takes addresses and no kinds of memory. Where registered memory has another address on
//! the device (`CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM` is 0: WSL2), the host's address is illegal
//! there, and the device is lost (sglang issue 40232). The calls for one copy say which side is
//! host memory, and the driver translates. So there each such copy is a call of its own.
//!
//! Calls from several threads at once can lose the device: `CUDA_ERROR_LAUNCH_FAILED`, reported by
//! a later call, and "invalid or corrupted push buffer stream" (Xid 32) in the kernel's log. Seen
//! on driver 580.159 with H200 and H100. While nine threads moved 3.5 GiB in calls of 64 copies of
//! 16 KiB, the device was lost in 15 of 15 runs; with 32 and 16 copies in 3 of 4; with one call at
//! a time in none of 3, whatever else was submitted. So a lock of the context lets one thread in:
//! the only lock of the crate under which a driver is called. A call of 64 copies takes some 20 us;
//! one of more would keep others longer, for little.

use std::cell::RefCell;
use std::ffi::c_int;

use super::api::{CUdevice, CUdeviceptr, CUmemcpyAttributes, CudaApi, CudaCode};
use super::{Cuda, stream};
use crate::device::{StreamHandle, Transfer};
use crate::error::{Error, Result};

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in stream order, not earlier.
const IN_STREAM_ORDER: i32 = 1;

/// cuda.h: CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
const CAN_USE_HOST_POINTER: c_int = 91;

/// Copies of one call at most.
pub(super) const MOST: usize = 64;
/// The driver may write shorter uploads itself.
const SHORT: usize = 32 << 10;

/// The call's three lists of arguments.
#[derive(Default)]
struct Lists {
    targets: Vec<CUdeviceptr>,
    sources: Vec<CUdeviceptr>,
    lengths: Vec<usize>,
}

/// Whether registered memory has the same address on the device as on the host.
pub(super) fn shares_addresses(api: &CudaApi, device: CUdevice) -> bool {
    let mut shares: c_int = 0;
    // SAFETY: writes a number.
    let code = unsafe { api.device_attribute.call(&raw mut shares, CAN_USE_HOST_POINTER, device) };
    // A driver that does not know the question is older than systems where the answer is no.
    code != CudaCode::SUCCESS || shares != 0
}

thread_local! {
    /// Kept between batches, so that a batch allocates nothing.
    static BATCH_LISTS: RefCell<Lists> = RefCell::new(Lists::default());
}

impl Lists {
    fn fill(&mut self, transfers: &[Transfer]) {
        let Self { targets, sources, lengths } = self;
        targets.clear();
        sources.clear();
        lengths.clear();
        // The order is free: see the module's page.
        let is_short =
            |transfer: &&Transfer| matches!(transfer, Transfer::Upload { len, .. } if *len < SHORT);
        let long = transfers.iter().filter(|transfer| !is_short(transfer));
        for transfer in transfers.iter().filter(is_short).chain(long) {
            // All are in one space (driver API manual, "Unified Addressing"), or the device's.
            let (source, target, len) = match *transfer {
                Transfer::Upload { src, dst, len } => (src.expose_provenance() as u64, dst.0, len),
                Transfer::Download { src, dst, len } => (src.0, dst.expose_provenance() as u64, len),
                Transfer::OnDevice { src, dst, len } => (src.0, dst.0, len),
                Transfer::OnHost { src, dst, len } => {
                    (src.expose_provenance() as u64, dst.expose_provenance() as u64, len)
                }
            };
            targets.push(target);
            sources.push(source);
            lengths.push(len);
        }
    }
}

/// Whether the result of a call for `copies` copies is final: the call was accepted, or the device
/// is lost. After any other error each copy is submitted by itself.
pub(super) fn concluded(
    device: &str,
    said: Result<()>,
    copies: usize,
    failed: &mut dyn FnMut(usize, Error),
) -> bool {
    match said {
        Ok(()) => true,
        Err(error) if error.is_device_lost() => {
            (0..copies).for_each(|place| failed(place, error.clone()));
            true
        }
        Err(error) => {
            crate::foreign::debug!(
                target: "pinpool::stream", device, %error, copies,
                "a batch was refused: its copies go one by one"
            );
            false
        }
    }
}

impl Cuda {
    /// Submits all of them by one call. `None`: this driver has no such call.
    ///
    /// # Safety
    /// As for [`Driver::copy_many`](crate::device::Driver::copy_many).
    pub(super) unsafe fn try_batch(
        &self,
        handle: StreamHandle,
        transfers: &[Transfer],
    ) -> Option<Result<()>> {
        let batch = self.api.copy_batch?;
        let _current = match self.current() {
            Ok(current) => current,
            Err(error) => return Some(Err(error)),
        };
        // One set of attributes for all copies. The driver finds out by itself where memory lies.
        let mut attributes =
            CUmemcpyAttributes { source_order: IN_STREAM_ORDER, source: [0; 2], target: [0; 2], flags: 0 };
        let mut first = 0;
        BATCH_LISTS.with_borrow_mut(|lists| {
            lists.fill(transfers);
            let _alone = self.batches.lock();
            let Lists { targets, sources, lengths } = lists;
            let mut fault = 0;
            // SAFETY: the caller promises the copies; the lists are read before the call returns.
            let code = unsafe {
                batch.call(
                    targets.as_mut_ptr(),
                    sources.as_mut_ptr(),
                    lengths.as_mut_ptr(),
                    transfers.len(),
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    &raw mut fault,
                    stream(handle),
                )
            };
            Some(self.said("cuMemcpyBatchAsync", code))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::DevicePtr;
    use crate::error::{DeviceError, ErrorClass};

    /// A lost device ends all copies of a call. After other errors each is submitted by itself.
    #[test]
    fn a_lost_device_is_asked_no_more() {
        let error = |class| {
            let (device, text) = ("cuda:0".into(), "for a test".into());
            Error::Device(DeviceError { device, call: "cuMemcpyBatchAsync", code: 1, text, class })
        };
        let concludes = |said| {
            let mut failed = Vec::new();
            (concluded("cuda:0", said, 2, &mut |place, _| failed.push(place)), failed)
        };
        assert_eq!(concludes(Ok(())), (true, vec![]));
        assert_eq!(concludes(Err(error(ErrorClass::DeviceLost))), (true, vec![0, 1]));
        assert_eq!(concludes(Err(error(ErrorClass::DriverShutdown))), (true, vec![0, 1]));
        assert_eq!(concludes(Err(error(ErrorClass::Argument))), (false, vec![]));
    }

    #[test]
    fn short_uploads_come_first_and_nothing_else_changes_places() {
        let host = std::ptr::without_provenance_mut::<u8>(1 << 30);
        let up = |at: u64, len| Transfer::Upload { src: host, dst: DevicePtr(at), len };
        let down = |at: u64, len| Transfer::Download { src: DevicePtr(at), dst: host, len };
        let mut lists = Lists::default();
        // Twice: nothing of the batch before is left.
        for _ in 0..2 {
            lists.fill(&[
                up(1, 2 << 20),
                up(2, 2 << 10),
                down(3, 8),
                up(4, SHORT),
                up(5, SHORT - 1),
                up(6, 4 << 20),
            ]);
            let host = 1 << 30;
            assert_eq!(lists.lengths, [2 << 10, 32_767, 2 << 20, 8, 32_768, 4 << 20]);
            assert_eq!(lists.targets, [2, 5, 1, host, 4, 6]);
            assert_eq!(lists.sources, [host, host, host, 3, host, host]);
        }
    }
}
