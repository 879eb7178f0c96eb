//! Splitting a load into several, one behind the other, so that it needs little device memory.

use super::header::Tensor;

/// To what a window rounds up each tensor. The device aligns memory to it by itself.
const ROUND: u64 = 256;

/// Splits tensors, in their order, into windows of at most `bytes` of device memory, or of one
/// tensor that is larger. A load of each after the other, or of the next while one is used, needs
/// no more device memory than these windows, whatever the length of the checkpoint.
///
/// Each tensor counts with its bytes rounded up to a multiple of 256, so that gaps for the
/// alignment are in the count ([`Loader::align`](super::Loader::align) of at most 256). Every
/// window has a tensor, and one without bytes counts nothing.
///
/// ```no_run
/// # fn load(copier: &pinpool::Copier) -> pinpool::Result<()> {
/// use std::collections::VecDeque;
///
/// use pinpool_safetensors::{Checkpoint, windows};
///
/// let checkpoint = Checkpoint::open("model.safetensors")?;
/// let wanted = checkpoint.tensors().filter(|tensor| !tensor.name().starts_with("vision."));
/// let mut started = VecDeque::new(); // three windows at most, one that is used and two behind it
/// let mut windows = windows(wanted, 512 << 20);
/// loop {
///     for window in windows.by_ref().take(3 - started.len()) {
///         started.push_back(checkpoint.loader(copier).only(window).start()?);
///     }
///     let Some(load) = started.pop_front() else { break };
///     for tensor in load.blocking() {
///         let _ = tensor?; // copied to where it is needed, and dropped
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub fn windows(tensors: impl IntoIterator<Item = Tensor>, bytes: u64) -> impl Iterator<Item = Vec<Tensor>> {
    let mut tensors = tensors.into_iter().peekable();
    std::iter::from_fn(move || {
        let (mut window, mut total) = (Vec::new(), 0_u64);
        while let Some(tensor) = tensors.next_if(|tensor| {
            total = total.saturating_add(tensor.bytes().div_ceil(ROUND).saturating_mul(ROUND));
            window.is_empty() || total <= bytes
        }) {
            window.push(tensor);
        }
        (!window.is_empty()).then_some(window)
    })
}
