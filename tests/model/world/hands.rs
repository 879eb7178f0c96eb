//! What callers do with what they hold, and misuses that are refused.

use super::*;

impl World<'_> {
    pub(super) fn write(&mut self, at: usize, kind: u8) {
        if self.bufs.is_empty() {
            return;
        }
        let (at, id) = (at % self.bufs.len(), self.id());
        let live = &mut self.bufs[at];
        let capacity = live.buf.capacity();
        let len = (capacity * usize::from(kind) / 255).max(1);
        live.bytes = pattern(id, len);
        live.buf.clear();
        match kind % 4 {
            0 => live.buf.put_slice(&live.bytes),
            1 => std::io::Write::write_all(&mut live.buf, &live.bytes).unwrap(),
            2 => {
                live.buf.try_resize(len, 1).unwrap();
                live.buf.copy_from_slice(&live.bytes);
            }
            _ => {
                let spare = live.buf.spare_capacity_mut();
                assert_eq!(spare.len(), capacity);
                for (to, from) in spare.iter_mut().zip(&live.bytes) {
                    to.write(*from);
                }
                // SAFETY: within the capacity, and written just now.
                unsafe { live.buf.set_len(len) };
            }
        }
        let have = live.buf.remaining();
        let need = have + 1;
        let refused = live.buf.try_extend_from_slice(&vec![0; need]);
        assert_eq!(refused, Err(Error::TooSmall { need, have }));
    }

    pub(super) fn drop_buf(&mut self, at: usize, who: Who) {
        let Some(live) = self.take_buf(at) else { return };
        match who {
            Who::Main => drop(live),
            Who::Helper => self.helper.run(move || drop(live)),
            Who::Fresh => std::thread::spawn(move || drop(live)).join().unwrap(),
        }
        if who != Who::Main {
            self.tally.note("return on another thread");
        }
    }

    pub(super) fn forget_buf(&mut self, at: usize) {
        let Some(live) = self.take_buf(at) else { return };
        self.forgotten.push((live.range(), live.buf.capacity()));
        self.tally.note("buffer forgotten");
        std::mem::forget(live.buf);
    }

    pub(super) fn misuse(&mut self, misuse: Misuse, at: usize) {
        let lane = self.lane(at);
        let (stream, device) = (self.lanes[lane].stream.clone(), self.lanes[lane].device);
        if self.dead.iter().any(|d| *d) {
            return;
        }
        let far = (device + 1) % DEVICES;
        let refuse = |result: Result<InFlight<PinnedBuf>, SubmitError<PinnedBuf>>| match result {
            Err(SubmitError { error, buffer: Some(buf) }) => (error, buf),
            Err(SubmitError { error, buffer: None }) => panic!("the buffer was lost: {error}"),
            Ok(_) => panic!("a misuse was accepted"),
        };
        match misuse {
            Misuse::Empty | Misuse::Range | Misuse::Small | Misuse::Memory => {
                let Some(Live { mut buf, mut bytes }) = self.take_buf(at) else { return };
                if buf.len() < 2 {
                    return self.bufs.push(Live { buf, bytes });
                }
                let on = if misuse == Misuse::Memory { far } else { device };
                let Some(memory) = self.memory(on, buf.len()) else {
                    return self.bufs.push(Live { buf, bytes });
                };
                let len = buf.len();
                let (error, buf) = match misuse {
                    Misuse::Empty => {
                        bytes.clear();
                        buf.clear();
                        refuse(stream.upload(buf, &memory))
                    }
                    Misuse::Range => refuse(stream.upload_part(buf, 1..len + 1, &memory)),
                    Misuse::Small => refuse(stream.upload(buf, memory.slice(1..))),
                    _ => refuse(stream.upload(buf, &memory)),
                };
                match (misuse, &error) {
                    (Misuse::Empty, Error::Argument(text))
                        if text.contains("no byte of the buffer was written") =>
                    {
                        self.tally.note("refused: empty")
                    }
                    (Misuse::Range, Error::Argument(text)) if text.contains("is outside of") => {
                        self.tally.note("refused: out of range")
                    }
                    (Misuse::Small, Error::TooSmall { .. }) => self.tally.note("refused: too small"),
                    (Misuse::Memory, Error::Mismatch { .. }) => self.tally.note("refused: wrong device"),
                    _ => assert!(self.tolerant(), "{misuse:?} was refused with {error}"),
                }
                self.bufs.push(Live { buf, bytes });
            }
            Misuse::Pool => {
                let Some(other) = self.other.clone() else { return };
                let Ok(mut buf) = other.try_checkout(64) else { return };
                buf.extend_from_slice(&[1; 64]);
                let Some(stranger) = self.lanes.iter().find(|l| l.device == 1).map(|l| l.stream.clone())
                else {
                    return;
                };
                let Some(memory) = self.memory(1, 64) else { return };
                let (error, buf) = refuse(stranger.upload(buf, &memory));
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                let (error, _) = refuse(stranger.hold(buf));
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                self.tally.note("refused: wrong device");
            }
            Misuse::Claim => {
                let (Some(other), Some(lane)) = (&self.other, self.lanes.iter().find(|l| l.device == 1))
                else {
                    return;
                };
                let result = other.try_checkout_on(&lane.stream, 64);
                assert!(matches!(result, Err(Error::Mismatch { .. })), "{result:?}");
                self.tally.note("refused: wrong device");
            }
        }
    }
}
