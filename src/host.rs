//! The host device: a device whose memory and streams are the host's own.
//!
//! It has two uses. On a machine without an accelerator it is a working device: each stream is a
//! thread that copies by `memcpy`, and a program runs unchanged. In tests it is a bad device on
//! demand: it copies late, lets streams overtake each other, refuses calls, hangs and dies.
//!
//! # Kernels
//!
//! Functions of the program imitate a server's kernels: [`launch`] queues one on a stream, where it
//! runs in order with the copies, and gets the bytes of device memory. So a server has the same
//! shape here as on a GPU.
//!
//! ```
//! # use pinpool::{Device, Pool, Unpinned, host};
//! # let device = Device::open("host")?;
//! # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
//! let (stream, x, y) = (device.stream()?, device.alloc(3)?, device.alloc(3)?);
//! let mut input = pool.checkout(3)?;
//! input.extend_from_slice(b"abc");
//! let input = stream.upload(input, &x)?;
//! drop(host::launch(&stream, &[x.slice(..)?], &[y.slice(..)?], |reads, writes| {
//!     writes[0].iter_mut().zip(reads[0]).for_each(|(y, x)| *y = x.to_ascii_uppercase());
//! })?);
//! let output = stream.download(&y, pool.checkout(3)?)?.wait()?;
//! assert_eq!(*output, *b"ABC");
//! # input.wait()?;
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Nodes
//!
//! A [`HostNode`] is a machine with one or more host devices, `host:0`, `host:1` and so on.
//! `Device::open("host")` uses [`HostNode::system`]. Tests make nodes of their own with
//! [`HostNode::new`], which share nothing, and open their devices by
//! [`Device::on`](crate::Device::on). What is asked about a device that the node does not have is
//! answered with zero, and a command to it does nothing.
//!
//! # Streams and memory
//!
//! Each stream has a thread (`pinpool-host-N`) that runs the stream's operations in order and
//! sleeps when there are none. [`HostConfig::late`] makes the threads wait for a random time before
//! each copy, so that code that does not wait for an event reads bytes that are not written yet.
//!
//! Pinning and registering lock the pages (`mlock`, so the memlock limit applies) and record the
//! range: ranges that overlap are refused, those that share a page are not. Host memory of the
//! device is a mapping, locked unless it is managed memory. The device sees all host memory at the
//! host's own addresses.
//!
//! # Failing
//!
//! [`HostNode::fail`] arms a [`Fault`]; with [`HostNode::start_trace`] a test learns which calls a
//! scenario makes, and can repeat it with each of them failing once. [`HostNode::hang`] keeps the
//! operations of a device from running until it is resumed, [`Failure::Stall`] those of a stream.
//!
//! [`HostNode::kill`] ends a device. Its queued operations are dropped, and once `kill` returns, or
//! any call has failed with class [`DeviceLost`](crate::ErrorClass::DeviceLost), none of its copies
//! touches host memory any more. Every later call fails with that class, but for those that give
//! back what the device has, so that [`HostNode::live`] comes to zero where no buffer was
//! quarantined.

pub use crate::copy::launch::launch;
pub use crate::device::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
