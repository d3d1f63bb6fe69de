//! Tests of order: the device starts computing before the link starts further copies.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::*;

/// The calls in order.
#[derive(Clone, Default)]
struct CallLog(Arc<Mutex<Vec<String>>>);

impl CallLog {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device that logs when a copy begins.
struct LoggingDevice {
    device: DeviceDouble,
    log: CallLog,
}

impl Device for LoggingDevice {
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError> {
        self.device.allocate(slots, slot_bytes)
    }

    fn submit(&mut self, transfer: Transfer) {
        self.log.lock().push(format!("copy {}", transfer.direction));
        self.device.submit(transfer);
    }

    fn poll(&mut self) -> Option<TransferDone> {
        self.device.poll()
    }

    fn wait(&mut self) -> Option<TransferDone> {
        self.device.wait()
    }

    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
}

impl TieredCompute for CallLog {
    fn host(&mut self, _: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration> {
        let mut log = self.lock();
        log.extend(experts.iter().map(|(expert, _)| format!("{expert} on the host")));
        None
    }

    fn device(&mut self, _: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration> {
        let mut log = self.lock();
        log.extend(experts.iter().map(|(expert, _)| format!("{expert} on the device")));
        None
    }
}

#[test]
fn experts_on_the_device_are_computed_before_copies_begin() {
    let mut log = CallLog::default();
    let equip = |device| LoggingDevice { device, log: log.clone() };
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 4), COPY, "lru", |m| m, equip).unwrap();
    (0..3).for_each(|expert| fixture.visit(0, &[expert], 1).unwrap());
    log.lock().clear();
    let wanted = [0, 2].map(|expert| WantedExpert { expert: ExpertId(expert), tokens: 1 });
    fixture.cache.visit(LayerIdx(0), &wanted, &[], &mut log).unwrap();
    let expected = ["expert 2 on the device", "copy into", "expert 0 on the device"];
    assert_eq!(log.lock()[..], expected.map(String::from));
    assert!(fixture.is_on_device(0, 2), "its slot was not taken for the other expert");
}
