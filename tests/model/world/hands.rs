//! What callers do with what they hold.

use super::*;

impl World<'_> {
    pub(super) fn write(&mut self, at: usize, kind: u8) {
        if self.bufs.is_empty() {
            return;
        }
        let (at, id) = (at % self.bufs.len(), self.id());
        let Held { buf, bytes } = &mut self.bufs[at];
        *bytes = pattern(id, (buf.capacity() * usize::from(kind) / 255).max(1));
        buf.clear();
        if kind % 2 == 0 {
            return buf.put_slice(bytes);
        }
        let spare = buf.spare_capacity_mut().iter_mut();
        spare.zip(&*bytes).for_each(|(to, from)| _ = to.write(*from));
        // SAFETY: within the capacity, and written just now.
        unsafe { buf.set_len(bytes.len()) };
    }

    pub(super) fn drop_buf(&mut self, at: usize, who: Who) {
        let Some(live) = self.take_buf(at) else { return };
        self.on(who, move || drop(live));
        if who != Who::Main {
            self.tally.note("return on another thread");
        }
    }

    pub(super) fn forget_buf(&mut self, at: usize) {
        let Some(live) = self.take_buf(at) else { return };
        self.forgotten.push((range(&live.buf), live.buf.capacity()));
        self.tally.note("buffer forgotten");
        std::mem::forget(live.buf);
    }
}
