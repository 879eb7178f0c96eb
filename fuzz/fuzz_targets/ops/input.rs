//! What the fuzzer's bytes are taken for: the pool and the device, and the operations.

use arbitrary::Arbitrary;
use pinpool::Request;

#[derive(Arbitrary, Debug, Clone, Copy)]
pub struct Size {
    mantissa: u8,
    shift: u8,
    less: u8,
}

impl Size {
    /// From 1 byte to 1 MiB, often next to a power of two.
    pub fn len(self) -> usize {
        let len = (usize::from(self.mantissa) + 1) << (self.shift % 13);
        len.saturating_sub(usize::from(self.less % 3)).max(1)
    }

    pub fn align(self) -> usize {
        match self.less / 3 % 16 {
            0 => 4096,
            1 => 65_536,
            2 => 1,
            3 => 2 << 20,
            _ => 64,
        }
    }

    pub fn request(self) -> (Request, usize, usize) {
        (Request::new(self.len()).align(self.align()), self.len(), self.align())
    }
}

#[derive(Arbitrary, Debug, Clone, Copy)]
pub struct Setup {
    pub seed: u8,
    pub pages: u8,
    pub extent: u8,
    pub region: u8,
    pub initial: u8,
    pub cache: u8,
    pub lanes: bool,
    pub mood: u8,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
pub enum Op {
    Checkout { size: Size },
    CheckoutWaiting { size: Size },
    CheckoutMany { sizes: [Size; 3] },
    CheckoutOn { lane: bool, size: Size },
    Ask { sizes: [Size; 2], two: bool },
    PollAsked { at: u8 },
    DropAsked { at: u8 },
    Return { at: u8 },
    Write { at: u8 },
    Share { at: u8 },
    DropShared { at: u8 },
    Forget { at: u8, what: u8 },
    Upload { at: u8, lane: bool, offset: u8, keep: bool },
    UploadShared { at: u8, lane: bool, offset: u8, keep: bool },
    UploadBlocking { lane: bool, offset: u8, len: u8 },
    Download { at: u8, lane: bool, offset: u8, len: u8, keep: bool },
    DownloadReady { at: u8, lane: bool, offset: u8, len: u8, keep: bool },
    WaitReady { at: u8 },
    DropReady { at: u8 },
    OnDevice { lane: bool, from: u8, to: u8, len: u8 },
    Hold { at: u8, lane: bool, keep: bool },
    Wait { at: u8 },
    PollFlight { at: u8 },
    IsDone { at: u8 },
    DropFlight { at: u8 },
    Synchronize { lane: bool },
    WaitFor { lane: bool },
    Step { count: u8 },
    StepStream { nth: u8 },
    Reap,
    Stall { nth: u8 },
    Resume,
    Fail { call: u8, nth: u8, failure: u8 },
    FailAny { nth: u8, failure: u8 },
    Kill { sure: u8 },
    Trim { keep: u8 },
    Close { sure: u8 },
}
